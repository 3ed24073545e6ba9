"""Everything that a GPU proves or measures, by groups: tests side by side, timings one after another.

    python benchmarks/gpu.py --list
    python benchmarks/gpu.py tests training --out results

Each command's output is ``TAG.log`` in the folder, whatever becomes of it; a line says how it ended and how long it
took. The exit code is 1 where one failed. docs/throughput.md, docs/parallelism.md and docs/sampling.md say what the
figures mean.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[1]
PYTEST = "python -m pytest -v -p no:cacheprovider --import-mode=importlib -m gpu"
MDLM = "python benchmarks/train.py qwen3_{size}_mdlm_pretrain --sequences {sequences} --steps 12 --warmup 8"
BD3LM = "python benchmarks/train.py qwen3_0p6b_bd3lm_pretrain --sequences 16 --steps 8 --warmup 6 --block-size 32"
LOCAL = " --transformer-impl local"
FULL_RECOMPUTATION = (
    "'model.config.recompute_granularity=\"full\"' 'model.config.recompute_method=\"uniform\"'"
    " model.config.recompute_num_layers=1"
)
# Four layers of the real widths: what one GPU holds in training.
EXPERTS = {
    "qwen3_30b_a3b_mdlm_pretrain": "model.config.num_layers=4",
    "llada2_mini_pretrain": "model.config.num_layers=4 'model.config.moe_layer_freq=[0,1,1,1]'",
}
EXPERTS_STEP = "python benchmarks/train.py {recipe} --sequences 16 --steps 10 --warmup 6{layers} --set {fields}"
_KILL, _OTHER = "test_a_killed_run_goes_on_and_its_model_writes", "test_a_run_goes_on_with_the_other_layers"
_INTO_LOCAL = "test_weights_trained_with_transformer_engine_load_into_local_layers"
# A process for each kind of layers: what Megatron chooses at its import stays.
TESTS = {
    "kill_local": f"tests/training/test_cuda.py::{_KILL}[local]",
    "kill_te": f"tests/training/test_cuda.py::{_KILL}[transformer_engine]",
    "te_into_local": f"tests/training/test_cuda.py::{_INTO_LOCAL}",
    "local_to_te": f"tests/training/test_cuda.py::{_OTHER}[local-transformer_engine]",
    "te_to_local": f"tests/training/test_cuda.py::{_OTHER}[transformer_engine-local]",
    "precisions": "tests/training/test_cuda.py::test_every_precision_trains",
    "import": "tests/connectors/test_import_cuda.py",
    "golden": "tests/connectors/test_golden_cuda.py",
    "lora": "tests/recipes/test_lora_cuda.py",
    "kernels": "tests/kernels tests/objectives tests/models/test_cpu.py",
    "attention": "tests/attention",
    "core": "tests/models/test_core_patterns_cuda.py",
    "sampling": "tests/sampling tests/inference",
}


@dataclass(frozen=True)
class Group:
    """Commands by tag.

    Args:
        at_once: how many run side by side; 1 where their times count.
        commands: shell words by tag.
        timeout: seconds that each gets.
    """

    at_once: int
    commands: dict[str, str] = field(default_factory=dict)
    timeout: int = 300


GROUPS = {
    "tests": Group(
        at_once=len(TESTS),
        commands={tag: f"{PYTEST} {tests}" for tag, tests in TESTS.items()},
    ),
    "training": Group(
        at_once=1,
        commands={
            "mdlm_0p6b_te": MDLM.format(size="0p6b", sequences=32),
            "mdlm_0p6b_local": MDLM.format(size="0p6b", sequences=32) + LOCAL,
            "mdlm_1p7b_te": MDLM.format(size="1p7b", sequences=16),
            "mdlm_1p7b_local": MDLM.format(size="1p7b", sequences=16) + LOCAL,
            "bd3lm_0p6b_te": BD3LM,
            "bd3lm_0p6b_local": BD3LM + LOCAL,
            "bd3lm_32k": (
                "python benchmarks/train.py qwen3_0p6b_bd3lm_pretrain --sequences 1 --length 32768 --steps 2 "
                "--warmup 2 --set " + FULL_RECOMPUTATION
            ),
        },
    ),
    "experts": Group(
        at_once=1,
        commands={
            f"{recipe}{tag}": EXPERTS_STEP.format(recipe=recipe, layers=layers, fields=f"{fields} {more}".strip())
            for recipe, fields in EXPERTS.items()
            for tag, layers, more in (
                ("_te", "", ""),
                ("_local", LOCAL, ""),
                ("_recomputed", "", FULL_RECOMPUTATION),
            )
        },
    ),
}


def main() -> None:
    """Run the groups that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="in this order")
    parser.add_argument("--only", nargs="+", metavar="TAG", help="these commands of the groups")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the logs")
    parser.add_argument("--list", action="store_true", help="print the commands")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    if arguments.list:
        for name in arguments.groups or GROUPS:
            console.print(f"[bold]{name}")
            for tag, command in GROUPS[name].commands.items():
                console.print(f"  {tag}: {command}", markup=False)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    codes = [code for name in arguments.groups for code in run_group(GROUPS[name], arguments, console)]
    sys.exit(any(codes))


def run_group(group: Group, arguments: argparse.Namespace, console: Console) -> list[int]:
    """Exit codes of a group's commands."""
    wanted = {tag: c for tag, c in group.commands.items() if not arguments.only or tag in arguments.only}
    with ThreadPoolExecutor(group.at_once) as pool:
        return list(pool.map(lambda item: run_command(*item, group.timeout, arguments.out, console), wanted.items()))


def run_command(tag: str, command: str, timeout: int, folder: Path, console: Console) -> int:
    """Exit code of one command, 124 where it was ended at its time; its output goes to the folder."""
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    log = folder / f"{tag}.log"
    began = time.monotonic()
    with log.open("w") as output:
        try:
            code = subprocess.run(
                words,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    console.print(f"{tag}: exit {code}, {time.monotonic() - began:.0f} s: {last.strip()[:300]}", markup=False)
    return code


if __name__ == "__main__":
    main()
