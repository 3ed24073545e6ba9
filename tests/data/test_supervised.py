"""Fine-tuning rows from files, padded and packed, over a byte tokenizer: every id is known by hand."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from nemo_dllm.collections.diffusion.data.chat_encoder import ChatEncoder
from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate
from nemo_dllm.collections.diffusion.data.sources import find_sources
from nemo_dllm.collections.diffusion.data.supervised import (
    FittedSamples,
    PackedRows,
    PaddedRows,
    count_packed_rows,
    training_order,
)
from nemo_dllm.collections.diffusion.data.supervised_tokens import cached_supervised, encode_supervised
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

EOS = 256
ROWS = [("ab", "c"), ("a", "bcd"), ("abcd", "e"), ("", "ab"), ("a", "b" * 9), ("x" * 12, "y"), ("a", "bcd")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "byte"))


def encoder_of(tokenizer, **options):
    return ChatEncoder(tokenizer, ChatTemplate(tokenizer, "", **options))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in ROWS))
    return path


@pytest.fixture
def corpus(file, tokenizer):
    return encode_supervised(find_sources([file]), encoder_of(tokenizer))


def fitted(corpus, seq_length=8, **options):
    return FittedSamples(corpus.samples, seq_length, EOS, **options)


def parts_of(samples, values):
    """What belongs to each sample, of values that all have one after the other."""
    pairs = zip(samples.starts().tolist(), samples.ends.tolist(), strict=True)
    return [values[start:end].tolist() for start, end in pairs]


def test_encoded_corpus(corpus):
    expected = [[*(p + c).encode(), EOS] for p, c in ROWS]
    assert parts_of(corpus.samples, corpus.samples.tokens) == expected
    assert list(map(sum, parts_of(corpus.samples, corpus.samples.answer))) == [len(c) + 1 for _, c in ROWS]
    assert corpus.samples.first_answers.tolist() == [len(p) for p, _ in ROWS]
    assert corpus.samples.rows.tolist() == [[0, line] for line in range(1, 8)]
    assert (corpus.sources[0].endswith("a.jsonl"), corpus.bad_rows) == (True, [])


@pytest.mark.parametrize(
    "row, reason",
    [
        ('{"prompt": "a", "completion": "b\\udc00"}', "field 'completion' has half of a surrogate pair at character 2"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            "field 'messages' as JSON has half of a surrogate pair at character 31",
        ),
        ('{"\\ud800": 1}', "the name of field '\\ud800' has half of a surrogate pair at character 1"),
    ],
)
def test_half_of_a_surrogate_pair_in_any_field(file, tokenizer, row, reason):
    file.write_text(file.read_text() + row)
    corpus = encode_supervised(find_sources([file]), encoder_of(tokenizer), max_bad_rows=1)
    assert [found.reason for found in corpus.bad_rows] == [f"{reason}, which is no text; take it out"]


def test_bad_rows_up_to_the_limit(file, tokenizer):
    lines = ['{"text": "x"}', "{", '{"prompt": "a", "completion": " "}', '{"prompt": "\\ud800", "completion": "a"}']
    file.write_text(file.read_text() + "\n".join(lines))
    corpus = encode_supervised(find_sources([file]), encoder_of(tokenizer), max_bad_rows=4)
    assert len(corpus.samples.ends) == 7
    found = [(row.row, row.reason.split(",")[0]) for row in corpus.bad_rows]
    assert found == [
        (8, "there are no fields messages"),
        (9, "broken JSON"),
        (10, "turn 1 of the assistant is empty"),
        (11, "field 'prompt' has half of a surrogate pair at character 1"),
    ]
    with pytest.raises(
        ValueError, match=r"(?s)2 rows cannot be used, more than max_bad_rows=1;.*a.jsonl:9: broken JSON"
    ):
        encode_supervised(find_sources([file]), encoder_of(tokenizer), max_bad_rows=1)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"(?s)a.jsonl: no row of 1 inputs can be used\n.*a.jsonl:1: there are no"):
        encode_supervised(find_sources([file]), encoder_of(tokenizer))
    with pytest.raises(
        ValueError, match="is of format text, whose rows have no fields; known: jsonl, parquet, dataset"
    ):
        encode_supervised(find_sources([file], format="text"), encoder_of(tokenizer))


def test_other_formats_give_the_same(file, tokenizer, tmp_path, corpus):
    import datasets

    rows = datasets.load_dataset("json", data_files=str(file), cache_dir=str(tmp_path / "hf"))["train"]
    rows.to_parquet(tmp_path / "a.parquet")
    rows.rename_columns({"prompt": "q", "completion": "a"}).save_to_disk(str(tmp_path / "saved"))
    for name, columns in (("a.parquet", None), ("saved", {"prompt": "q", "completion": "a"})):
        other = encode_supervised(find_sources([tmp_path / name]), encoder_of(tokenizer), columns)
        assert all(np.array_equal(a, b) for a, b in zip(other.samples, corpus.samples, strict=True))


def test_cache_knows_all_that_matters(file, tokenizer, tmp_path):
    def folders():
        return len(list((tmp_path / "cache" / "supervised").iterdir()))

    def read(**options):
        encoder = encoder_of(tokenizer, **options)
        return cached_supervised(find_sources([file]), encoder, tmp_path / "cache", {"prompt": "prompt"})

    first, again = read(), read()
    assert folders() == 1
    fresh = encode_supervised(find_sources([file]), encoder_of(tokenizer))
    for corpus in (first, again):
        assert all(
            np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(corpus.samples, fresh.samples, strict=True)
        )
    read(loss_turns="last")
    assert folders() == 2
    file.write_text(json.dumps({"prompt": "p", "completion": "c"}))
    assert len(read().samples.ends) == 1
    assert folders() == 3


def test_cutting_leaves_out_what_has_no_answer_left(corpus):
    samples = fitted(corpus)
    # Eleven tokens are cut to eight; the answer behind twelve tokens is gone.
    assert (len(samples), samples.num_truncated, samples.num_dropped) == (6, 1, 1)
    assert samples.lengths.tolist() == [4, 5, 6, 3, 8, 5]
    assert samples.sample(4).tokens.tolist() == list(b"a" + b"b" * 7)
    summary = samples.summary(corpus.sources)
    assert summary.startswith("6 samples of 31 tokens, 1 cut, 1 left out, without an answer within 8 tokens, the fi")
    assert summary.endswith("a.jsonl:6")
    dropped = fitted(corpus, drop_too_long=True)
    assert (len(dropped), dropped.num_dropped, dropped.num_truncated) == (5, 2, 0)
    assert "2 left out, longer than 8 tokens, the first: " in dropped.summary(corpus.sources)
    assert fitted(corpus, seq_length=20).summary(corpus.sources) == "7 samples of 48 tokens, 0 cut"
    with pytest.raises(ValueError, match="none of 1 samples has an answer within seq_length=8 tokens; raise it"):
        fitted(corpus, chosen=np.array([5]))


def test_blocks_are_filled_with_trained_end_tokens(corpus):
    samples = fitted(corpus, block_size=4)
    assert samples.lengths.tolist() == [4, 8, 8, 4, 8, 8]
    assert samples.sample(1).tokens.tolist() == [*b"abcd", EOS, EOS, EOS, EOS]
    assert samples.sample(1).loss_mask.tolist() == [False] + [True] * 7
    with pytest.raises(ValueError, match="seq_length=8 is not a multiple of block_size=3"):
        fitted(corpus, block_size=3)


@pytest.mark.parametrize("supervise", [False, True])
def test_padding_by_position_not_by_value(corpus, supervise):
    rows = PaddedRows(fitted(corpus), 6, None, 2, supervise_padding=supervise)
    row = rows[1]
    assert row["tokens"].tolist() == [*b"abcd", EOS, EOS, EOS, EOS]
    assert row["loss_mask"].tolist() == [False, True, True, True, True] + [supervise] * 3
    assert ("key_mask" in row) == (not supervise)
    if not supervise:
        assert row["key_mask"].tolist() == [True] * 5 + [False] * 3
    assert (row["tokens"].dtype, row["loss_mask"].dtype, row["sample_index"].dtype) == (
        torch.int64,
        torch.bool,
        torch.int64,
    )


def test_padding_to_the_longest_of_the_global_batch(corpus):
    samples = fitted(corpus)
    widths = [len(row["tokens"]) for row in PaddedRows(samples, 6, None, 2, pad_to_multiple_of=2)]
    assert widths == [6, 6, 6, 6, 8, 8]
    # Batches that begin at item 1.
    widths = [len(row["tokens"]) for row in PaddedRows(samples, 6, None, 2, first_index=1, pad_to_multiple_of=1)]
    assert widths == [4, 6, 6, 8, 8, 5]
    rows = PaddedRows(samples, 6, None, 2, first_index=1, pad_to_multiple_of=1)
    assert [len(rows[index]["tokens"]) for index in (5, 0, 2, 1, 4, 3, 0)] == [5, 4, 6, 6, 8, 8, 4]
    assert len(PaddedRows(samples, 6, None, 2)[0]["tokens"]) == 8


def test_the_width_of_a_batch_is_looked_for_once(corpus):
    asked = []

    class Order:
        def at(self, index):
            asked.append(index)
            return np.arange(1000) % 3, index

    rows = PaddedRows(fitted(corpus), 1000, Order(), 500, pad_to_multiple_of=2)
    assert {len(rows[index]["tokens"]) for index in range(1000)} == {6}
    assert len(asked) == 2000  # once for the sample, once for the width


def test_fillers_count_nothing(corpus):
    samples = fitted(corpus)
    rows = PaddedRows(samples, 8, None, 4, num_counted=5)
    assert [bool(row["loss_mask"].any()) for row in rows] == [True] * 5 + [False] * 3
    assert torch.equal(rows[5]["tokens"], rows[0]["tokens"])
    packed = PackedRows(samples, 6, None, num_counted=count_packed_rows(samples))
    assert [bool(row["loss_mask"].any()) for row in packed] == [True] * 5 + [False]
    with pytest.raises(IndexError):
        rows[8]


def triples(rows):
    """Per sample the (token, trained) pairs, in an order that does not depend on the rows."""
    found = []
    for row in rows:
        ids = row.get("document_ids", torch.zeros_like(row["tokens"]))
        for document in ids[row["key_mask"]].unique().tolist():
            of_one = (ids == document) & row["key_mask"]
            found.append(list(zip(row["tokens"][of_one].tolist(), row["loss_mask"][of_one].tolist(), strict=True)))
    return sorted(found)


@pytest.mark.parametrize("block_size", [None, 4])
def test_packed_and_padded_train_the_same(corpus, block_size):
    samples = fitted(corpus, seq_length=16, block_size=block_size)
    padded = PaddedRows(samples, len(samples), training_order(samples, 1), 1)
    packed = PackedRows(samples, count_packed_rows(samples), seed=1)
    assert triples(padded) == triples(packed)
    assert len(packed) < len(padded)
    for row in packed:
        assert (
            row["tokens"].shape == row["loss_mask"].shape == row["key_mask"].shape == row["document_ids"].shape == (16,)
        )
        assert not row["loss_mask"][~row["key_mask"]].any()
        pads = row["document_ids"][~row["key_mask"]]
        assert len(pads) == 0 or pads.unique().tolist() == [int(row["document_ids"][row["key_mask"]].max()) + 1]
        starts = [0, *(row["document_ids"].diff() != 0).nonzero().flatten().add(1).tolist()]
        assert not block_size or all(start % block_size == 0 for start in starts)
    assert packed.efficiency == samples.lengths.sum() / (len(packed) * 16)


def test_pads_of_a_packed_row_can_be_trained_with_its_last_sample(corpus):
    samples = fitted(corpus, seq_length=16)
    plain = PackedRows(samples, count_packed_rows(samples), None)
    for row, trained in zip(plain, PackedRows(samples, len(plain), None, supervise_padding=True), strict=True):
        real, last = row["key_mask"], row["document_ids"][row["key_mask"]].max()
        assert "key_mask" not in trained
        assert torch.equal(row["tokens"], trained["tokens"]) and (trained["tokens"][~real] == EOS).all()
        assert torch.equal(trained["loss_mask"], row["loss_mask"] | ~real)
        assert torch.equal(trained["document_ids"], row["document_ids"].clamp(max=last))


def test_epochs_are_packed_anew(corpus):
    samples = fitted(corpus, seq_length=20)
    num_rows = count_packed_rows(samples)
    rows = PackedRows(samples, 8 * num_rows, seed=1)
    epochs = [[rows[epoch * num_rows + i]["tokens"].tolist() for i in range(num_rows)] for epoch in range(8)]
    assert len({str(epoch) for epoch in epochs}) > 1
    tokens = [sorted(token for row in epoch for token in row) for epoch in epochs]
    assert tokens == [tokens[0]] * 8
    again = PackedRows(samples, 8 * num_rows, seed=1)
    assert [again[i]["tokens"].tolist() for i in (9, 2)] == [rows[i]["tokens"].tolist() for i in (9, 2)]


def test_length_groups(corpus):
    samples = fitted(corpus)
    rows = PaddedRows(samples, 60, training_order(samples, 1, length_group_size=2), 2, pad_to_multiple_of=1)
    waste = sum(int((~row["key_mask"]).sum()) for row in rows)
    shuffled = PaddedRows(samples, 60, training_order(samples, 1), 2, pad_to_multiple_of=1)
    assert waste < sum(int((~row["key_mask"]).sum()) for row in shuffled)
    for start in range(0, 60, 6):
        epoch = sorted(tuple(rows[i]["tokens"][rows[i]["key_mask"]].tolist()) for i in range(start, start + 6))
        assert epoch == sorted(tuple(samples.sample(i).tokens.tolist()) for i in range(6))
