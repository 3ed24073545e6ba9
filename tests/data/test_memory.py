"""What data cost in memory, and processes that make the same data at once."""

import json
import subprocess
import sys
import tracemalloc
from functools import partial

import numpy as np
import pytest
from transformers import AutoTokenizer

from nemo_dllm.collections.diffusion.data import supervised_tokens
from nemo_dllm.collections.diffusion.data.chat_encoder import ChatEncoder
from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate
from nemo_dllm.collections.diffusion.data.documents import records_of
from nemo_dllm.collections.diffusion.data.sources import find_sources
from nemo_dllm.collections.diffusion.data.supervised import FittedSamples, PackedRows, PaddedRows, training_order
from nemo_dllm.collections.diffusion.data.supervised_tokens import SupervisedTokens, cached_supervised
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "byte")


def test_encoding_holds_no_more_than_a_part(tmp_path, tokenizer, monkeypatch):
    """A million tokens more, 6 MB, change nothing: what counts is a part of the file, and what a call encodes."""
    monkeypatch.setattr(supervised_tokens, "records_of", partial(records_of, part_bytes=2**16))
    monkeypatch.setattr(supervised_tokens, "_ROWS_PER_CALL", 16)
    line = json.dumps({"prompt": "q" * 100, "completion": "a" * 2900}) + "\n"
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    encoder = ChatEncoder(loaded, ChatTemplate(loaded, ""))
    peaks = []
    for rows in (100, 500):
        (tmp_path / "a.jsonl").write_text(line * rows)
        tracemalloc.start()
        corpus = cached_supervised(find_sources([tmp_path / "a.jsonl"]), encoder, tmp_path / "cache")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(corpus.samples.tokens) == rows * 3001
        assert isinstance(corpus.samples.tokens, np.memmap) and isinstance(corpus.samples.answer, np.memmap)
    assert peaks[1] - peaks[0] < 1_000_000


def anonymous_memory():
    """Bytes of this process that are no pages of files."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024


@pytest.fixture(scope="module")
def mapped_corpus(tmp_path_factory):
    """50,000 samples of 5 to 150 tokens on disk, 16 MB."""
    folder = tmp_path_factory.mktemp("mapped")
    lengths = np.random.default_rng(0).integers(5, 150, 50_000)
    arrays = {
        "tokens": np.arange(lengths.sum(), dtype=np.uint32) % 250,
        "answer": np.ones(lengths.sum(), bool),
        "ends": np.cumsum(lengths),
        "first_answers": np.zeros(len(lengths), np.int64),
        "rows": np.zeros((len(lengths), 2), np.int64),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return SupervisedTokens(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in SupervisedTokens._fields))


@pytest.mark.parametrize("packing", [False, True])
def test_a_worker_stays_flat_over_an_epoch(mapped_corpus, packing):
    samples = FittedSamples(mapped_corpus, 512, 256)
    if packing:
        rows = PackedRows(samples, 10**6, seed=0)
    else:
        rows = PaddedRows(samples, 10**6, training_order(samples, 0), 8, pad_to_multiple_of=64)
    for index in range(rows.num_rows // 10):
        rows[index]
    before = anonymous_memory()
    for index in range(rows.num_rows // 10, rows.num_rows, 1 if packing else 5):
        rows[index]
    assert anonymous_memory() - before < 3_000_000


RACER = """
import sys, time
from pathlib import Path
from transformers import AutoTokenizer
from nemo_dllm.collections.diffusion.data.chat_encoder import ChatEncoder
from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate
from nemo_dllm.collections.diffusion.data.sources import find_sources
from nemo_dllm.collections.diffusion.data.supervised_tokens import cached_supervised

folder, name = Path(sys.argv[1]), sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(sys.argv[3])
encoder = ChatEncoder(tokenizer, ChatTemplate(tokenizer, ""))
(folder / f"{name}.ready").touch()
while len(list(folder.glob("*.ready"))) < 2:
    time.sleep(0.001)
samples = cached_supervised(find_sources([folder / "a.jsonl"]), encoder, folder / "cache").samples
print(int(samples.tokens.sum()), len(samples.ends), int(samples.answer.sum()))
"""


def test_two_processes_fill_the_cache_at_once(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}", "completion": "b" * 50}) + "\n" for i in range(3000))
    )
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    racers = [
        subprocess.Popen([*command, name, str(tokenizer)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in ("one", "two")
    ]
    try:
        outputs = [racer.communicate(timeout=400) for racer in racers]
    finally:
        # One whose rival has not come would wait for ever.
        for racer in racers:
            racer.kill()
    assert [racer.returncode for racer in racers] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][0].split()[1:] == ["3000", str(3000 * 51)]
    # One folder, whole, and nothing that was begun.
    assert len(list((tmp_path / "cache" / "supervised").iterdir())) == 1
