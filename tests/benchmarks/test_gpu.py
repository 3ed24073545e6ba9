"""The commands of gpu.toml, and how they are run; none of them needs a GPU here."""

import argparse
import importlib.util
import json
import os
import shlex
import sys
import time
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


def run(gpu, folder, code, timeout=300, within=300):
    arguments = argparse.Namespace(out=folder, files=folder, deadline=time.monotonic() + within)
    with (folder / "console").open("a") as file:
        command = f"python -c {shlex.quote(code)}"
        return gpu.run_command("tag", command, timeout, {**os.environ}, arguments, Console(file=file))


def test_output_and_exit_code_of_a_command(gpu, tmp_path):
    assert run(gpu, tmp_path, "print('said'); raise SystemExit(3)") == 3
    assert (tmp_path / "tag.log").read_text() == "said\n"
    assert (tmp_path / "console").read_text().startswith("tag: exit 3, ")


def test_a_command_that_takes_too_long_is_told_to_end(gpu, tmp_path):
    code = "import signal, sys, time\n"
    code += "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('ended its own')))\nwhile True: time.sleep(1)"
    assert run(gpu, tmp_path, code, timeout=5) == 124
    assert (tmp_path / "tag.log").read_text() == "ended its own\n"


def test_what_comes_after_the_time_that_there_is_does_not_run(gpu, tmp_path):
    assert run(gpu, tmp_path, "import time; time.sleep(60)", within=3) == 124
    (tmp_path / "tag.log").unlink()
    assert run(gpu, tmp_path, "print('said')", within=0) == 124
    assert not (tmp_path / "tag.log").exists()


MATES = {"pair1": "left1", "left1": "pair1", "one": "other", "other": "one"}
"""Commands that end when both have begun."""
SAY = """
import json, os, sys, time
folder, tag, *mates = sys.argv[1:]
began = time.time()
open(os.path.join(folder, tag + " has begun"), "w").close()
while not all(os.path.exists(os.path.join(folder, mate + " has begun")) for mate in mates): time.sleep(0.1)
names = ("CUDA_VISIBLE_DEVICES", "MASTER_PORT", "PET_MASTER_PORT")
file = open(os.path.join(folder, tag), "w")
json.dump([began, time.time(), *map(os.environ.get, names)], file)
"""


def test_groups_take_turns_with_the_devices(gpu, tmp_path):
    code = shlex.quote(SAY.replace("{", "{{").replace("}", "}}"))
    sizes = {"pair": 2, "left": 1, "all": 3, "right": 1}
    groups = {
        name: gpu.Group(
            size,
            1,
            250,
            {tag: f"python -c {code} {{out}} {tag} {MATES.get(tag, '')}" for tag in (f"{name}1", f"{name}2")},
        )
        for name, size in sizes.items()
    }
    arguments = argparse.Namespace(
        out=tmp_path, files=tmp_path, only=None, devices=[0, 2, 5], deadline=time.monotonic() + 280
    )
    with (tmp_path / "console").open("w") as file:
        assert gpu.run_side_by_side(groups, arguments, Console(file=file)) == [0] * 8
    told = {name + end: json.loads((tmp_path / (name + end)).read_text()) for name in sizes for end in "12"}
    devices = {name: {int(device) for device in figures[2].split(",")} for name, figures in told.items()}
    assert [len(devices[f"{name}1"]) for name in sizes] == [*sizes.values()]
    for name, (began, ended, *_) in told.items():
        for other, (later, _, *_) in told.items():
            if name != other and devices[name] & devices[other]:
                assert not began <= later < ended
    # The one that needs them all waits for those before it, and that after it for this one.
    assert told["all1"][0] >= max(told["pair2"][1], told["left2"][1]) and told["right1"][0] >= told["all2"][1]
    for _, _, visible, *ports in told.values():
        assert ports == [str(29600 + 100 * int(visible.split(",")[0]))] * 2


def test_a_group_waits_for_that_whose_files_it_reads(gpu, tmp_path):
    code = shlex.quote(SAY.replace("{", "{{").replace("}", "}}"))
    groups = {
        name: gpu.Group(1, 1, 250, {name: f"python -c {code} {{out}} {name} {MATES.get(name, '')}"}, after=after)
        for name, after in (("one", None), ("other", None), ("pair", "one"), ("alone", "absent"))
    }
    arguments = argparse.Namespace(
        out=tmp_path, files=tmp_path, only=None, devices=[0, 1, 2, 3], deadline=time.monotonic() + 280
    )
    with (tmp_path / "console").open("w") as file:
        assert gpu.run_side_by_side(groups, arguments, Console(file=file)) == [0] * 4
    told = {name: json.loads((tmp_path / name).read_text()) for name in groups}
    assert told["pair"][0] >= told["one"][1]


def test_more_devices_than_there_are(gpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "pair", "--devices", "0", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "--devices 0 are fewer than pair needs, 2" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["training", "--only", "absent"], ["training", "--only", "kernels"]])
def test_nothing_to_run_is_an_error(gpu, monkeypatch, tmp_path, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "--list shows them" in capsys.readouterr().err and not (tmp_path / "out").exists()
