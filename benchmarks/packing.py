"""Throughput of fine-tuning on short samples: padded to the maximum, padded to the batch, and packed.

    python benchmarks/packing.py qwen3_0p6b_mdlm_finetune gsm8k_train.jsonl
    python benchmarks/packing.py qwen3_0p6b_bd3lm_finetune gsm8k_train.jsonl --sequences 4

Lines of the file have `question` and `answer`. Random weights, the real training loop as in train.py, one process; each
way of filling rows trains on as many rows per step. What counts are tokens of questions and answers, end token
included, not positions: neither pads nor what fills blocks up. Tokens per second are the median over the measured steps
of each step's tokens over its time. Without a tokenizer, one is trained on the file.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import fiddle as fdl  # noqa: E402
import nemo_run as run  # noqa: E402
import torch  # noqa: E402
from layout_models import forget_layout  # noqa: E402
from train import Clock, add_recipe_arguments, measured_recipe  # noqa: E402

from nemo_dllm.collections.diffusion.data.supervised_datamodule import SupervisedDataModule  # noqa: E402
from nemo_dllm.collections.diffusion.data.tokenizer import train_byte_bpe  # noqa: E402

COLUMNS = {"prompt": "question", "completion": "answer"}
WAYS = {
    "padded to the maximum": {},
    "padded to the batch": {"pad_to_multiple_of": 64, "group_by_length": True},
    "packed": {"packing": True},
}
# What a recipe for one device needs beside the command line of this benchmark.
FIXED = {"objective": None, "block_size": None}


def measure(arguments: argparse.Namespace, way: str, tokenizer: Path, folder: Path) -> dict:
    """Train for the asked number of steps with rows filled in one way; returns the row of the table."""
    clock = Clock()
    recipe = measured_recipe(argparse.Namespace(**vars(arguments), **FIXED), clock, str(folder / "runs" / way))
    recipe.data = run.Config(
        SupervisedDataModule,
        path=str(arguments.file),
        tokenizer=str(tokenizer),
        columns=COLUMNS,
        chat_template="",
        seq_length=arguments.length,
        micro_batch_size=arguments.micro_batch or arguments.sequences,
        global_batch_size=arguments.sequences,
        block_size=getattr(recipe.model.objective, "block_size", None),
        cache_dir=str(folder / "cache"),
        **WAYS[way],
    )
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    task = fdl.build(recipe)
    task()
    tokens, positions = count_tokens(task.keywords["data"], arguments)
    seconds = clock.seconds()[arguments.warmup :]
    rates = [count / time for count, time in zip(tokens, seconds, strict=True)]
    return {
        "rows": way,
        "tokens/s": round(statistics.median(rates)),
        "real %": round(100 * sum(tokens) / positions, 1),
        "tokens per step": round(sum(tokens) / len(tokens)),
        "step ms": round(1000 * statistics.median(seconds), 1),
        "peak GB": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "last loss": round(float(clock.losses[-1]), 3),
    }


def count_tokens(data: SupervisedDataModule, arguments: argparse.Namespace) -> tuple[list[float], int]:
    """Tokens of questions and answers in each measured step, and positions of all of them.

    Blocks are filled up with tokens that rows do not tell from others: these are taken off by their share of the set.
    """
    first, last = arguments.warmup * arguments.sequences, (arguments.warmup + arguments.steps) * arguments.sequences
    dataset = data.training_dataset(last)
    rows = [dataset[index] for index in range(first, last)]
    share = data.training_samples.num_tokens / int(data.training_samples.lengths.sum())
    real = [int(row["key_mask"].sum()) * share for row in rows]
    steps = range(0, len(rows), arguments.sequences)
    return [sum(real[at : at + arguments.sequences]) for at in steps], sum(len(row["tokens"]) for row in rows)


def main() -> None:
    """Parse the command line, run the recipe in each way, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_recipe_arguments(parser, steps=20)
    parser.add_argument("file", type=Path, help=".jsonl with question and answer")
    parser.add_argument("--tokenizer", type=Path, help="Hugging Face folder")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = arguments.tokenizer or train_byte_bpe(
            [arguments.file.read_text()], 8192, Path(folder) / "tokenizer"
        )
        for way in WAYS:
            rows.append(measure(arguments, way, tokenizer, Path(folder)))
            forget_layout()
            torch.cuda.empty_cache()
    for row in rows:
        row["ratio"] = round(row["tokens/s"] / rows[0]["tokens/s"], 2)
        print("  ".join(f"{name}: {value}" for name, value in row.items()))
    if arguments.json:
        with open(arguments.json, "a") as file:
            file.writelines(json.dumps({"recipe": arguments.recipe, **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
