"""Blends of corpora below a stand-in trainer, through NeMo's real samplers, after real preprocessing."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

pytestmark = pytest.mark.nemo

LENGTH = 8


@pytest.fixture(scope="module")
def module():
    return importlib.import_module("nemo_dllm.collections.diffusion.data.pretraining_datamodule")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two corpora of 50 documents; the token of document d is d, or 100 + d."""
    folder = tmp_path_factory.mktemp("corpora")
    byte_tokenizer(folder / "byte")
    for name, offset in (("a", 0), ("b", 100)):
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.uint16)
        for document in range(50):
            builder.add_document(torch.full((5 + document % 7,), offset + document), [5 + document % 7])
        builder.finalize(str(folder / f"{name}.idx"))
    return folder


@pytest.fixture
def build(module, folder):
    def make(paths=("a", "b"), trainer=None, validation_paths=None, **fields):
        fields = {
            "seq_length": LENGTH,
            "micro_batch_size": 1,
            "global_batch_size": 4,
            "split": (0.8, 0.1, 0.1),
            **fields,
        }
        data = module.PretrainingDataModule(
            [folder / path for path in paths],
            str(folder / "byte"),
            validation_paths=validation_paths and [folder / path for path in validation_paths],
            **fields,
        )
        data.trainer = trainer or SimpleNamespace(max_steps=20, global_step=0)
        data.setup("fit")
        return data

    return make


def global_batches(data, loader, monkeypatch, data_parallel_size=1):
    from megatron.core import parallel_state

    per_rank = []
    for rank in range(data_parallel_size):
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: data_parallel_size)
        per_rank.append(list(data.data_sampler.transform_dataloader(loader)))
    per_step = data.global_batch_size // (data.micro_batch_size * data_parallel_size)
    steps = []
    for start in range(0, len(per_rank[0]), per_step):
        micro = [batch for batches in per_rank for batch in batches[start : start + per_step]]
        rows = [{name: value[i].tolist() for name, value in b.items()} for b in micro for i in range(len(b["tokens"]))]
        steps.append(sorted(rows, key=lambda row: row["sample_index"]))
    return steps


OPTIONS = [{}, {"random_length_probability": 0.5, "bos_token_id": 257, "weights": [3, 1]}]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_layout_and_resume_feed_the_same(build, monkeypatch, options):
    first = build(**options)
    straight = global_batches(first, first.train_dataloader(), monkeypatch)
    assert [row["sample_index"] for step in straight for row in step] == list(range(80))
    for micro, data_parallel_size in ((1, 4), (2, 2), (4, 1)):
        data = build(micro_batch_size=micro, **options)
        assert global_batches(data, data.train_dataloader(), monkeypatch, data_parallel_size) == straight
    first.trainer.global_step = 7
    # With more steps to go than at first, the order stays.
    resumed = build(micro_batch_size=2, trainer=SimpleNamespace(max_steps=25, global_step=0), **options)
    resumed.load_state_dict(first.state_dict())
    resumed.trainer.global_step = 7
    steps = global_batches(resumed, resumed.train_dataloader(), monkeypatch, 2)
    assert steps[:13] == straight[7:] and len(steps) == 18


def documents_in(rows):
    return {token for row in rows for token in row["tokens"].tolist() if token < 256}


def test_splits_share_no_document(build):
    data = build(num_val_rows=None)
    training = documents_in(data.training_dataset(400))
    validation = documents_in(data.val_dataloader().dataset)
    test = documents_in(data.test_dataloader().dataset)
    assert training == {*range(40), *range(100, 140)}
    # What is left after the last full row is not read.
    assert {*range(40, 44), *range(140, 144)} <= validation <= {*range(40, 45), *range(140, 145)}
    assert {*range(45, 49), *range(145, 149)} <= test <= {*range(45, 50), *range(145, 150)}
    assert data.test_dataloader().mode == "test"


def test_corpora_for_validation(build):
    data = build(paths=["a"], validation_paths=["b"], split=(1, 0, 0))
    assert documents_in(data.training_dataset(400)) == set(range(50))
    assert set(range(100, 149)) <= documents_in(data.val_dataloader().dataset) <= set(range(100, 150))
    assert data.test_dataloader().dataset is data.val_dataloader().dataset


def test_weights(build):
    def share_of_first(**options):
        rows = build(**options).training_dataset(400)
        return sum(int(row["tokens"][-1]) < 100 for row in rows) / 400

    assert share_of_first() == 0.5
    assert share_of_first(weights=[3, 1]) == 0.75


def test_validation_rows_and_fillers(build):
    data = build(num_val_rows=5)
    rows = list(data.val_dataloader().dataset)
    assert [bool(row["loss_mask"].any()) for row in rows] == [True] * 5 + [False] * 3
    assert len({tuple(row["tokens"].tolist()) for row in build(num_val_rows=None).val_dataloader().dataset}) == 8


def test_document_ids_are_the_default(build):
    row = build().training_dataset(1)[0]
    assert (row["document_ids"].diff() != 0).tolist() == (row["tokens"].diff() != 0).tolist()
    assert "document_ids" not in build(document_boundaries=False).training_dataset(1)[0]


def test_preprocessed_text(module, folder, tmp_path):
    from nemo_dllm.collections.diffusion.data.preprocess import preprocess

    (tmp_path / "text.log").write_text("\n".join(f"line {i}" for i in range(50)))
    preprocess(tmp_path / "text.log", tmp_path / "c", folder / "byte", format="lines", workers=1)
    data = module.PretrainingDataModule(
        str(tmp_path / "c"), str(folder / "byte"), seq_length=16, global_batch_size=4, split=(0.9, 0.1, 0.0)
    )
    data.trainer = SimpleNamespace(max_steps=2, global_step=0)
    data.setup("fit")
    row = data.val_dataloader().dataset[0]
    assert data.tokenizer.ids_to_text(row["tokens"].tolist()) == "line 45line 46"
    assert row["document_ids"].tolist() == [0] * 8 + [1] * 8


def test_errors(module, build, folder, tmp_path):
    cases = {
        r"split=\(1, 0\) must be shares of training, validation, test": {"split": (1, 0)},
        r"split=\(1, 0, 0\) leaves no validation; give it a share, or name validation_paths": {"split": (1, 0, 0)},
        r"random_length_probability=2 must be in \[0, 1\]": {"random_length_probability": 2},
        "seed=-1 must not be negative": {"seed": -1},
        "num_val_rows=0 must be at least 1": {"num_val_rows": 0},
        "2 weights for 1 paths; give one per path": {"weights": [1, 1]},
        r"weights=\[0\] must be positive": {"weights": [0]},
        r"weights=1 must be positive": {"weights": 1},
        r"split=98,2,0 must be shares": {"split": "98,2,0"},
        r"split=abc must be shares": {"split": "abc"},
        r"split=\['1', '1', '0'\] must be shares": {"split": ["1", "1", "0"]},
        r"weights=\[inf\] must be positive": {"weights": [float("inf")]},
        r"split=\(nan, 1, 0\) must be shares": {"split": (float("nan"), 1, 0)},
        r"paths=\[\] names no corpus": {"paths": []},
        "paths has 'x.bin' 2 times; name it once, with the sum of its weights": {"paths": ["x.bin", "y", "./x"]},
        "validation_paths has 'v' 2 times": {"validation_paths": ["v", "v", "w", "w", "w"]},
    }
    for message, fields in cases.items():
        with pytest.raises(ValueError, match=message):
            module.PretrainingDataModule(**{"paths": "x", "tokenizer": "y", **fields})
    with pytest.raises(FileNotFoundError, match=r"nowhere.bin' does not exist"):
        build(paths=["nowhere"])
    with pytest.raises(ValueError, match="too few for one sequence of seq_length=512; change `split`"):
        build(seq_length=512)


@pytest.mark.parametrize(
    "num_documents, shares, borders",
    [
        (10, (0.98, 0.02, 0.0), [0, 9, 10, 10]),
        (1000, (0.98, 0.02, 0.0), [0, 980, 1000, 1000]),
        (100, (8, 1, 1), [0, 80, 90, 100]),
        (3, (8, 1, 1), [0, 1, 2, 3]),
        (10, (1.0, 0.0, 0.0), [0, 10, 10, 10]),
        (10, (0.9, 0.0, 0.1), [0, 9, 9, 10]),
    ],
)
def test_borders(module, num_documents, shares, borders):
    assert module._borders(num_documents, shares) == borders


def test_checkpoint_context(build, folder, tmp_path):
    from nemo.lightning import io

    build(bos_token_id=257).io_dump(tmp_path / "context", yaml_attrs=[])
    loaded = io.load(tmp_path / "context")
    assert (loaded.paths, loaded.bos_token_id) == ([str(folder / "a"), str(folder / "b")], 257)


def test_bytes_of_the_validation_text(build):
    """Tokens of the first corpus are ASCII; rows that fill up the batch do not count."""
    data = build(paths=("a",), num_val_rows=3)
    rows = data.validation_dataset()
    assert data.num_validation_bytes == rows.num_counted * LENGTH < len(rows) * LENGTH
