"""Tokens per second of `preprocess` beside those of the tokenizer's own batch call.

    python benchmarks/preprocess.py corpus.jsonl --tokenizer FOLDER --workers 1 2

The batch call gets all texts in memory and writes nothing; with n workers it is given n threads. `preprocess` reads,
checks and writes; the start of its workers counts.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from nemo_dllm.collections.diffusion.data.preprocess import preprocess
from nemo_dllm.collections.diffusion.data.tokenizer import load_tokenizer


def batch_call_rate(texts: list[str], tokenizer, workers: int) -> float:
    """Tokens per second of the tokenizer's batch call, in batches of 1,000 texts."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    start = time.perf_counter()
    tokens = 0
    for first in range(0, len(texts), 1000):
        encoded = tokenizer(texts[first : first + 1000], add_special_tokens=False, verbose=False)
        tokens += sum(map(len, encoded["input_ids"]))
    return tokens / (time.perf_counter() - start)


def preprocess_rate(file: Path, tokenizer, workers: int) -> float:
    """Tokens per second of `preprocess`, workers' start-up included."""
    with tempfile.TemporaryDirectory() as folder:
        report = preprocess(file, Path(folder) / "x", tokenizer, workers=workers, append_eos=False)
    return report.tokens / report.seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSONL with a field `text`")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    texts = [json.loads(line)["text"] for line in arguments.file.read_text().splitlines()]
    print(f"{'workers':>7} {'batch call':>14} {'preprocess':>14} {'ratio':>6}")
    for workers in arguments.workers:
        raw = batch_call_rate(texts, tokenizer, workers)
        ours = preprocess_rate(arguments.file, tokenizer, workers)
        print(f"{workers:7} {raw:12,.0f}/s {ours:12,.0f}/s {ours / raw:6.2f}", flush=True)


if __name__ == "__main__":
    main()
