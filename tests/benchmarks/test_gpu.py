"""The commands of gpu.toml, and how they are run; none of them needs a GPU here."""

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("benchmark_gpu", ROOT / "benchmarks" / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look their annotations up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_command_has_a_log_of_its_own_and_runs_a_file_that_there_is(gpu):
    commands = [item for group in gpu.GROUPS.values() for item in group.commands.items()]
    assert len({tag for tag, _ in commands}) == len(commands)
    for tag, command in commands:
        words = shlex.split(command.format(out="OUT", files="FILES"))
        named = [word.partition("::")[0] for word in words if word.startswith(("benchmarks/", "docs/", "tests/"))]
        assert named and all((ROOT / name).exists() for name in named), tag
        assert "/tmp" not in command


def run(gpu, folder, code, timeout=300):
    arguments = argparse.Namespace(out=folder, files=folder)
    with (folder / "console").open("a") as file:
        return gpu.run_command("tag", f"python -c {shlex.quote(code)}", timeout, arguments, Console(file=file))


def test_output_and_exit_code_of_a_command(gpu, tmp_path):
    assert run(gpu, tmp_path, "print('said'); raise SystemExit(3)") == 3
    assert (tmp_path / "tag.log").read_text() == "said\n"
    assert (tmp_path / "console").read_text().startswith("tag: exit 3, ")


def test_a_command_that_takes_too_long_is_told_to_end(gpu, tmp_path):
    code = "import signal, sys, time\n"
    code += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('ended its own')))\nwhile True: time.sleep(1)"
    assert run(gpu, tmp_path, code, timeout=5) == 124
    assert (tmp_path / "tag.log").read_text() == "ended its own\n"


@pytest.mark.parametrize("arguments", [[], ["training", "--only", "absent"], ["training", "--only", "kernels"]])
def test_nothing_to_run_is_an_error(gpu, monkeypatch, tmp_path, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "--list shows them" in capsys.readouterr().err and not (tmp_path / "out").exists()
