"""Everything that a GPU proves or measures, by groups: tests side by side, timings one after another.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py tests training --out results
    python benchmarks/gpu.py tests training two --devices 0 1 2 3 --within 900 --out results

With ``--devices`` groups run side by side, in their order, each on as many GPUs as it needs.
The commands are in gpu.toml. Each one's output is ``TAG.log`` in the folder, whatever becomes of it; a line says how it
ended and how long it took. The exit code is 1 where one failed. docs/throughput.md, docs/parallelism.md and
docs/sampling.md say what the figures mean.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[1]
GRACE_SECONDS = 60
"""For a command to end when it is told to; torchrun gives its processes half of that."""


@dataclass(frozen=True)
class Group:
    """Commands of gpu.toml.

    Args:
        gpus: that its commands use together.
        at_once: how many run side by side; 1 where their times count.
        timeout: seconds that each gets.
        commands: shell words by tag.
        after: a group that must be over before, where both are asked for.
    """

    gpus: int
    at_once: int
    timeout: int
    commands: dict[str, str]
    after: str | None = None


GROUPS = {
    name: Group(**fields) for name, fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text()).items()
}


def main() -> None:
    """Run the groups that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="in this order")
    parser.add_argument("--only", nargs="+", metavar="TAG", help="these commands of the groups")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the logs")
    parser.add_argument("--files", type=Path, default=ROOT, help="folder of the tutorials' checkpoint and texts")
    parser.add_argument(
        "--devices", nargs="+", type=int, metavar="N", help="numbers of GPUs; default: all for each group"
    )
    parser.add_argument("--within", type=float, default=math.inf, metavar="SECONDS", help="end what runs after that")
    parser.add_argument("--list", action="store_true", help="print the commands")
    arguments = parser.parse_args()
    arguments.out, arguments.files = arguments.out.absolute(), arguments.files.absolute()
    console = Console(soft_wrap=True, highlight=False)
    if arguments.list:
        for name in arguments.groups or GROUPS:
            console.print(f"[bold]{name}")
            for tag, command in GROUPS[name].commands.items():
                console.print(f"  {tag}: {command}", markup=False)
        return
    there = {tag for name in arguments.groups for tag in GROUPS[name].commands}
    if not arguments.groups or not there.issuperset(arguments.only or ()):
        parser.error(f"name groups ({', '.join(GROUPS)}), and with --only tags of theirs; --list shows them")
    few = [name for name in arguments.groups if arguments.devices and GROUPS[name].gpus > len(arguments.devices)]
    if few:
        parser.error(
            f"--devices {' '.join(map(str, arguments.devices))} are fewer than {few[0]} needs, {GROUPS[few[0]].gpus}"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.deadline = time.monotonic() + arguments.within
    groups = {name: GROUPS[name] for name in arguments.groups}
    if arguments.devices:
        codes = run_side_by_side(groups, arguments, console)
    else:
        codes = [code for group in groups.values() for code in run_group(group, (), arguments, console)]
    sys.exit(any(codes))


def run_side_by_side(groups: dict[str, Group], arguments: argparse.Namespace, console: Console) -> list[int]:
    """Exit codes of all commands of groups that take turns with the devices."""
    free, changed = list(arguments.devices), threading.Condition()

    def run_on(devices: list[int], group: Group) -> list[int]:
        try:
            return run_group(group, devices, arguments, console)
        finally:
            with changed:
                free.extend(devices)
                changed.notify()

    with ThreadPoolExecutor(len(groups)) as pool:
        running: dict[str, Future[list[int]]] = {}
        for name, group in groups.items():
            if group.after in running:
                running[group.after].result()
            with changed:
                changed.wait_for(lambda: len(free) >= group.gpus)  # noqa: B023
                devices = [free.pop(0) for _ in range(group.gpus)]
            running[name] = pool.submit(run_on, devices, group)
        return [code for future in running.values() for code in future.result()]


def run_group(group: Group, devices: Sequence[int], arguments: argparse.Namespace, console: Console) -> list[int]:
    """Exit codes of a group's commands on devices; on all that there are without any."""
    wanted = {tag: c for tag, c in group.commands.items() if not arguments.only or tag in arguments.only}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        if group.at_once == 1:
            # Other groups' processes meet elsewhere.
            environment["MASTER_PORT"] = environment["PET_MASTER_PORT"] = str(29600 + 100 * devices[0])
    with ThreadPoolExecutor(group.at_once) as pool:
        run = partial(run_command, timeout=group.timeout, environment=environment, arguments=arguments, console=console)
        return list(pool.map(lambda item: run(*item), wanted.items()))


def run_command(
    tag: str,
    command: str,
    timeout: float,
    environment: dict[str, str],
    arguments: argparse.Namespace,
    console: Console,
) -> int:
    """Exit code of one command, 124 where it was ended at its time; its output goes to the folder of results.

    It is asked to end first: torchrun takes the processes that it has started along.
    """
    timeout = min(timeout, arguments.deadline - time.monotonic())
    if timeout <= 0:
        console.print(f"{tag}: not run, no time was left")
        return 124
    words = shlex.split(command.format(out=arguments.out, files=arguments.files))
    words = [sys.executable if word == "python" else word for word in words]
    log = arguments.out / f"{tag}.log"
    began = time.monotonic()
    with (
        log.open("w") as output,
        subprocess.Popen(words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment) as process,
    ):
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = 124
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    console.print(f"{tag}: exit {code}, {time.monotonic() - began:.0f} s: {last.strip()[:300]}", markup=False)
    return code


if __name__ == "__main__":
    main()
