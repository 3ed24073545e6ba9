"""Rows of corpora whose every token is known: token = 10 x document + place in it."""

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from nemo_dllm.collections.diffusion.data.indexed import TokenFile
from nemo_dllm.collections.diffusion.data.pretraining import DocumentStream, PretrainingRows, count_unrepeated_rows

LENGTHS = [3, 1, 4, 2, 7, 5]
VOCAB, BOS = 100, 99


def write(prefix, lengths=LENGTHS, offset=0):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document, length in enumerate(lengths):
        builder.add_document(torch.arange(length) + 10 * document + offset, [length])
    builder.finalize(f"{prefix}.idx")
    return TokenFile(prefix)


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "corpus")


def expected_stream(first, last, bos):
    """(token, document, is begin) of every position, written down the plain way."""
    return [
        item
        for document in range(first, last)
        for item in ([(BOS, document, True)] if bos else [])
        + [(10 * document + i, document, False) for i in range(LENGTHS[document])]
    ]


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("first, last", [(0, 6), (1, 5), (5, 6)])
def test_stream_at_every_place(corpus, first, last, bos):
    stream = DocumentStream(corpus, first, last, VOCAB, bos)
    expected = expected_stream(first, last, bos is not None)
    assert stream.num_tokens == len(expected)
    for begin in range(len(expected)):
        for length in (1, 2, 5, len(expected) - begin):
            piece = stream.read(begin, length)
            around = [expected[(begin + i) % len(expected)] for i in range(length)]
            assert piece.tokens.tolist() == [token for token, _, _ in around]
            assert piece.is_begin.tolist() == [is_begin for _, _, is_begin in around]
            assert [d % (last - first) for d in piece.documents - first] == [d - first for _, d, _ in around]


def rows(corpus, num_samples=40, sequence_length=4, seed=1, bos=None, **options):
    return PretrainingRows(
        [DocumentStream(corpus, 0, 6, VOCAB, bos)], [1.0], sequence_length, num_samples, seed, **options
    )


def test_rows_as_they_stand_with_document_ids(corpus):
    found = rows(corpus, num_samples=5, seed=None)
    assert (found.num_rows, found.rows_per_stream) == (5, [5])
    assert [row["tokens"].tolist() for row in found][:2] == [[0, 1, 2, 10], [20, 21, 22, 23]]
    assert [row["document_ids"].tolist() for row in found] == [
        [0, 0, 0, 1],
        [0, 0, 0, 0],
        [0, 0, 1, 1],
        [0, 0, 0, 0],
        [0, 1, 1, 1],
    ]
    assert all(row["loss_mask"].all() and "key_mask" not in row for row in found)
    assert {name: value.dtype for name, value in found[0].items()} == {
        "tokens": torch.int64,
        "loss_mask": torch.bool,
        "sample_index": torch.int64,
        "document_ids": torch.int64,
    }
    assert "document_ids" not in rows(corpus, document_boundaries=False)[0]


def test_begin_tokens_are_context_only(corpus):
    row = rows(corpus, num_samples=1, seed=None, bos=BOS, sequence_length=8)[0]
    assert row["tokens"].tolist() == [BOS, 0, 1, 2, BOS, 10, BOS, 20]
    assert row["loss_mask"].tolist() == [False, True, True, True, False, True, False, True]
    assert row["document_ids"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


def test_epochs_read_each_token_once_and_cut_elsewhere(corpus):
    found = rows(corpus, num_samples=50, sequence_length=5)
    cuts, orders = set(), set()
    for epoch in range(12):
        tokens = [found[4 * epoch + i]["tokens"].tolist() for i in range(4)]
        everything = [token for row in tokens for token in row]
        assert len(set(everything)) == 20  # of 22: the rest is shorter than a row
        cuts.add(frozenset(map(tuple, tokens)))
        orders.add(str(tokens))
    assert len(cuts) > 2 and len(orders) > 6


def test_one_document_that_goes_around_begins_anew(tmp_path):
    stream = DocumentStream(write(tmp_path / "one", [7]), 0, 1, VOCAB)
    found = PretrainingRows([stream], [1.0], 6, 12, seed=3)
    for row in found:
        breaks = (row["tokens"].diff() != 1).tolist()
        assert (row["document_ids"].diff() != 0).tolist() == breaks
    assert any((row["document_ids"] > 0).any() for row in found)


def test_an_item_depends_on_seed_and_index_only(corpus):
    straight = [row["tokens"].tolist() for row in rows(corpus, 40)]
    longer = rows(corpus, 100)
    assert [longer[i]["tokens"].tolist() for i in reversed(range(40))] == straight[::-1]
    assert [row["tokens"].tolist() for row in rows(corpus, 40, seed=2)] != straight
    with pytest.raises(IndexError):
        longer[-1]


def test_blend(tmp_path):
    corpora = [write(tmp_path / name, [8] * 10, offset) for name, offset in (("a", 0), ("b", 100), ("c", 200))]
    streams = [DocumentStream(corpus, 0, 10, 300) for corpus in corpora]
    found = PretrainingRows(streams, [2, 1, 1], 8, 400, seed=1)
    sources = np.array([int(row["tokens"][0]) // 100 for row in found])
    assert np.bincount(sources).tolist() == [200, 100, 100]
    assert np.bincount(sources[:20]).tolist() == [10, 5, 5]
    # Each source goes through its epochs by itself.
    of_first = [row["tokens"].tolist() for row, source in zip(found, sources, strict=True) if source == 0]
    assert all(len({str(sorted(row)) for row in of_first[start : start + 10]}) == 10 for start in range(0, 200, 10))
    # Ten rows each: the first source, with half of the samples, is used up after 20.
    assert count_unrepeated_rows(streams, [2, 1, 1], 8) in (20, 21)
    assert count_unrepeated_rows(streams, [1, 1, 1], 8) == 30


def test_fillers(corpus):
    found = rows(corpus, num_samples=8, seed=None, num_counted=5)
    assert [bool(row["loss_mask"].any()) for row in found] == [True] * 5 + [False] * 3
    assert torch.equal(found[5]["tokens"], found[0]["tokens"])
    assert [int(row["sample_index"]) for row in found] == list(range(8))


def test_random_lengths_keep_the_shape(corpus):
    found = rows(corpus, num_samples=4000, random_length_probability=0.25)
    lengths = [int(row["key_mask"].sum()) for row in found]
    assert all(row["tokens"].shape == (4,) for row in found)
    assert all(torch.equal(row["loss_mask"], row["key_mask"]) for row in found)
    assert all(row["key_mask"][:length].all() for row, length in zip(found, lengths, strict=True))
    # One in four is cut, to 1, 2, 3 or all 4 tokens alike; five standard deviations.
    counts = np.bincount(lengths, minlength=5)[1:]
    expected = np.array([250, 250, 250, 3250])
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected * (1 - expected / 4000))).all()
    whole = rows(corpus, num_samples=4000)
    assert all(torch.equal(found[i]["tokens"], whole[i]["tokens"]) for i in range(100))
    assert [int(row["key_mask"].sum()) for row in rows(corpus, 50, random_length_probability=0.25)] == lengths[:50]


def test_errors(corpus):
    with pytest.raises(ValueError, match="documents 0 to 5 of .*corpus have 22 tokens, too few .* seq_length=23"):
        rows(corpus, sequence_length=23)
    with pytest.raises(ValueError, match="corpus has 6 documents, too few to give each part of `split` one"):
        DocumentStream(corpus, 6, 6, VOCAB)
    with pytest.raises(ValueError, match="corpus begin with bos_token_id=0 already; set it to None"):
        DocumentStream(corpus, 0, 6, VOCAB, 0)
    for outside in (-1, VOCAB):
        with pytest.raises(ValueError, match=f"bos_token_id={outside} is outside the vocabulary of 100"):
            DocumentStream(corpus, 0, 6, VOCAB, outside)
    small = PretrainingRows([DocumentStream(corpus, 0, 6, 54)], [1.0], 4, 6, seed=None)
    with pytest.raises(ValueError, match="token 4 of document 5 is 54, outside the vocabulary of 54"):
        [small.streams[0].read(18, 4)]


@pytest.mark.parametrize("bos", [None, BOS])
def test_empty_documents(tmp_path, bos):
    """As Megatron-LM may write them; a part of the split that holds only such is an error."""
    corpus = write(tmp_path / "corpus", [2, 0, 3, 0])
    piece = DocumentStream(corpus, 0, 4, VOCAB, bos).read(0, 9 if bos else 5)
    assert piece.tokens.tolist() == ([BOS, 0, 1, BOS, BOS, 20, 21, 22, BOS] if bos else [0, 1, 20, 21, 22])
    for first, last in ((3, 4), (1, 2)):
        with pytest.raises(ValueError, match=f"documents {first} to {first} of .*corpus are empty; change `split`"):
            DocumentStream(corpus, first, last, VOCAB, bos)


def test_a_huge_corpus_costs_its_index_only(tmp_path):
    """64 GB of tokens that take no space on disk: reading them to open the corpus would take minutes."""
    import resource
    import time

    documents, length = 16_000, 2**20
    builder = IndexedDatasetBuilder(str(tmp_path / "huge.bin"), dtype=np.int32)
    builder.sequence_lengths = [length] * documents
    builder.document_indices = list(range(documents + 1))
    builder.finalize(str(tmp_path / "huge.idx"))
    with open(tmp_path / "huge.bin", "r+b") as file:
        file.truncate(documents * length * 4)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    stream = DocumentStream(TokenFile(tmp_path / "huge"), 0, documents, VOCAB)
    found = PretrainingRows([stream], [1.0], 4096, 10**12, seed=1)
    assert found.num_rows == 4_096_000
    for index in (0, 1, 10**6, 10**12 - 1):
        assert found[index]["tokens"].shape == (4096,)
    assert time.perf_counter() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB
