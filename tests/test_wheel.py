"""The wheel: built, installed somewhere else, and imported from there."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "golden")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, for setuptools leaves its folders behind, and takes what older ones left along."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_COPIED))
    run_python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel):
    """A folder with the installed wheel, and a folder to start Python in."""
    target = wheel.parent / "site"
    run_python("-m", "pip", "install", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def run_python(*arguments):
    """Without the environment, the user's packages and the current folder on the path."""
    result = subprocess.run([sys.executable, "-I", *map(str, arguments)], capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_holds_the_sources_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = [
        path for folder in ("cli", "collections", "connectors", "recipes") for path in (ROOT / folder).rglob("*.py")
    ]
    sources += [*ROOT.glob("*.py"), *(ROOT / "collections").rglob("*.html"), *(ROOT / "collections").rglob("*.jsonl")]
    assert names == {f"nemo_dllm/{path.relative_to(ROOT)}" for path in sources}


def test_imports_from_elsewhere_and_leaves_the_standard_library_alone(site):
    # An editable install in the same environment puts a finder in front of the path; -S keeps it out, and the
    # environment's packages are added by hand.
    script = f"""
import sys
sys.path += [{str(site)!r}, {sysconfig.get_path("purelib")!r}]
import collections
import nemo_dllm
for name in ("cli.main", *(f"collections.diffusion.{{room}}" for room in ("objectives", "sampling", "data"))):
    __import__("nemo_dllm." + name)
modules = {{name: module for name, module in sys.modules.items() if name.partition(".")[0] == "nemo_dllm"}}
for module in modules.values():
    assert (module.__file__ or list(module.__path__)[0]).startswith({str(site)!r}), module
assert collections is sys.modules["collections"]
print(len(modules), collections.__file__, collections.OrderedDict.__module__)
"""
    count, stdlib, home = run_python("-S", "-c", script).split()
    assert int(count) > 20
    assert Path(stdlib).parent.parent == Path(sysconfig.get_path("stdlib"))
    assert home == "collections"


def test_brings_its_commands(site):
    entry_points = next(site.glob("nemo_dllm-*.dist-info")) / "entry_points.txt"
    assert entry_points.read_text().split() == [
        *("[console_scripts]", "nemo-dllm", "=", "nemo_dllm.cli.main:main"),
        *("[nemo_run.cli]", "dllm", "=", "nemo_dllm.recipes"),
    ]
    assert (site / "bin" / "nemo-dllm").is_file()
