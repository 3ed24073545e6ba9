import pytest
import torch

from nemo_dllm.connectors.key_table import (
    GatedPair,
    KeyTable,
    ModelDimensions,
    QueryKeyValue,
    Replicated,
    Row,
    SplitColumns,
    SplitRows,
    TensorRank,
    VocabularyRows,
)

# 4 query heads of one row each in 2 groups, 7 tokens.
DIMENSIONS = ModelDimensions(heads=4, query_groups=2, head_dim=1, vocab_size=7)


def reader(*tensors):
    def read(index, rows=slice(None), columns=slice(None)):
        tensor = tensors[index]
        return tensor[rows] if tensor.dim() == 1 else tensor[rows, columns]

    return read


def column(*values):
    return torch.tensor([[float(value)] for value in values])


Q, K, V = column(0, 1, 2, 3), column(10, 11), column(20, 21)
TABLE = torch.arange(14.0).reshape(7, 2)
MATRIX = torch.arange(24.0).reshape(4, 6)

# layout, Hugging Face tensors, Megatron's parameter on one rank, on rank 0 and rank 1 of two: all by hand.
CASES = {
    "replicated": (Replicated(), [MATRIX], MATRIX, MATRIX, MATRIX),
    "rows": (SplitRows(), [MATRIX], MATRIX, MATRIX[:2], MATRIX[2:]),
    "columns": (SplitColumns(), [MATRIX], MATRIX, MATRIX[:, :3], MATRIX[:, 3:]),
    "vocabulary": (
        VocabularyRows(),
        [TABLE],
        torch.cat([TABLE, torch.zeros(1, 2)]),
        TABLE[:4],
        torch.cat([TABLE[4:], torch.zeros(1, 2)]),
    ),
    "query, key, value": (
        QueryKeyValue(),
        [Q, K, V],
        column(0, 1, 10, 20, 2, 3, 11, 21),
        column(0, 1, 10, 20),
        column(2, 3, 11, 21),
    ),
    "query, key, value bias": (
        QueryKeyValue(),
        [Q[:, 0], K[:, 0], V[:, 0]],
        torch.tensor([0.0, 1, 10, 20, 2, 3, 11, 21]),
        torch.tensor([0.0, 1, 10, 20]),
        torch.tensor([2.0, 3, 11, 21]),
    ),
    "gate and up": (
        GatedPair(),
        [column(0, 1, 2, 3), column(10, 11, 12, 13)],
        column(0, 1, 2, 3, 10, 11, 12, 13),
        column(0, 1, 10, 11),
        column(2, 3, 12, 13),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_reads_the_part_of_each_rank(name):
    layout, hf, whole, first, second = CASES[name]
    for expected, rank in ((whole, TensorRank(0, 1)), (first, TensorRank(0, 2)), (second, TensorRank(1, 2))):
        assert torch.equal(layout.read(reader(*hf), tuple(expected.shape), rank, DIMENSIONS), expected)


@pytest.mark.parametrize("name", CASES)
def test_writes_back_what_it_read(name):
    layout, hf, whole, first, second = CASES[name]
    for parts in ([whole], [first, second]):
        written = layout.write(parts, DIMENSIONS)
        assert len(written) == len(hf)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(written, hf, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_knows_the_shapes_of_the_hugging_face_tensors(name):
    layout, hf, whole, first, _ = CASES[name]
    shapes = [tuple(tensor.shape) for tensor in hf]
    assert list(layout.hf_shapes(tuple(whole.shape), 1, DIMENSIONS)) == shapes
    assert list(layout.hf_shapes(tuple(first.shape), 2, DIMENSIONS)) == shapes


@pytest.mark.parametrize(("rank", "asked"), [(0, slice(0, 4)), (1, slice(4, 7)), (2, slice(7, 7))])
def test_a_rank_asks_for_its_vocabulary_rows_only(rank, asked):
    seen = []

    def read(index, rows):
        seen.append(rows)
        return TABLE[rows]

    part = VocabularyRows().read(read, (4, 2), TensorRank(rank, 3), DIMENSIONS)
    assert seen == [asked]
    assert torch.equal(part[len(TABLE[asked]) :], torch.zeros(4 - len(TABLE[asked]), 2))


TABLE_OF_ROWS = KeyTable(
    rows=(
        Row(("embedding",), ("embed",), SplitRows()),
        Row(("layers.{layer}.a", "layers.{layer}.b"), ("h.{layer}.a",), Replicated(), range(3)),
        Row(("layers.{layer}.c{expert}",), ("h.{layer}.c.{expert}",), Replicated(), (1, 2), range(2)),
    ),
    ignored={"h.*.inv_freq": "computed"},
)


def test_a_table_spells_all_rows_out():
    assert [entry.hf for entry in TABLE_OF_ROWS.entries()] == [
        ("embed",),
        ("h.0.a",),
        ("h.1.a",),
        ("h.2.a",),
        ("h.1.c.0",),
        ("h.1.c.1",),
        ("h.2.c.0",),
        ("h.2.c.1",),
    ]


def test_a_table_spells_rows_out_for_the_layers_and_experts_asked_for():
    entries = TABLE_OF_ROWS.entries(layers=[0, 1], experts=[1])
    assert [(entry.megatron, entry.of_expert) for entry in entries] == [
        (("embedding",), False),
        (("layers.0.a", "layers.0.b"), False),
        (("layers.1.a", "layers.1.b"), False),
        (("layers.1.c1",), True),
    ]


def test_a_table_knows_why_a_tensor_is_not_used():
    assert TABLE_OF_ROWS.reason_to_ignore("h.12.inv_freq") == "computed"
    assert TABLE_OF_ROWS.reason_to_ignore("h.12.a") is None
