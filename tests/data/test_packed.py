import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from transformers import AutoTokenizer

from nemo_dllm.collections.diffusion.data import packed
from nemo_dllm.collections.diffusion.data.packed import (
    PackedTextDataset,
    ValidationDataset,
    cached_tokens,
    encode_documents,
    epoch_permutation,
)
from nemo_dllm.collections.diffusion.data.tokenizer import EOS_TOKEN, MASK_TOKEN, byte_tokenizer, train_byte_bpe

EOS_ID = 256
STREAM = np.arange(43, dtype=np.uint16)  # 10 rows of 4 and 3 tokens left over


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path_factory.mktemp("tokenizer") / "byte"))


def rows_of(dataset, indices):
    return [int(dataset[i]["tokens"][0]) // dataset.rows.sequence_length for i in indices]


def test_each_document_is_followed_by_end_of_text(tokenizer):
    encoded = encode_documents(["ab", "", "é"], tokenizer)
    assert encoded.tokens.tolist() == [97, 98, EOS_ID, EOS_ID, 0xC3, 0xA9, EOS_ID]
    assert encoded.tokens.dtype == np.uint16
    assert encoded.document_ends.tolist() == [3, 4, 7]


def test_special_strings_in_text_are_ordinary_text(tokenizer):
    text = f"x{MASK_TOKEN}{EOS_TOKEN}"
    encoded = encode_documents([text], tokenizer)
    assert encoded.tokens.tolist() == [*text.encode(), EOS_ID]
    # The tokenizer is not changed by that: prompts still parse them.
    assert tokenizer(MASK_TOKEN)["input_ids"] == tokenizer.convert_tokens_to_ids([MASK_TOKEN]) == [257]


def test_batches_do_not_show(tokenizer, monkeypatch):
    texts = [f"document {i}" for i in range(7)]
    whole = encode_documents(texts, tokenizer)
    monkeypatch.setattr(packed, "_DOCUMENTS_PER_BATCH", 3)
    for expected, actual in zip(whole, encode_documents(texts, tokenizer), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_tokenizer_without_end_of_text_is_refused(tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos_token"):
        encode_documents(["a"], tokenizer)


def test_large_vocabulary_takes_uint32(tokenizer, tmp_path):
    large = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    large.add_tokens([f"<extra_{i}>" for i in range(2**16 - len(large))])
    assert encode_documents(["a"], large).tokens.dtype == np.uint16
    large.add_tokens(["<one_more>"])
    assert encode_documents(["a<one_more>"], large).tokens.tolist() == [97, 2**16, EOS_ID]


def test_cache_hits_without_encoding_and_misses_on_any_change(tokenizer, tmp_path, monkeypatch):
    calls = []

    def counting(texts, tokenizer):
        calls.append(texts)
        return encode_documents(texts, tokenizer)

    monkeypatch.setattr(packed, "encode_documents", counting)
    texts = ["ab", "c"]
    first = cached_tokens(texts, tokenizer, tmp_path)
    assert isinstance(first.tokens, np.memmap)
    assert first.tokens.tolist() == [97, 98, EOS_ID, 99, EOS_ID]
    copy = AutoTokenizer.from_pretrained(saved_copy(tokenizer, tmp_path / "elsewhere"))
    assert cached_tokens(texts, copy, tmp_path).tokens.tolist() == first.tokens.tolist()
    assert len(calls) == 1

    other = AutoTokenizer.from_pretrained(train_byte_bpe(["ab ab ab"], 300, tmp_path / "bpe"))
    assert len(cached_tokens(texts, other, tmp_path).tokens) < len(first.tokens)
    cached_tokens(["a", "bc"], tokenizer, tmp_path)
    cached_tokens(["c", "ab"], tokenizer, tmp_path)
    assert len(calls) == 4
    monkeypatch.setattr(packed, "LAYOUT_VERSION", "next")
    cached_tokens(texts, tokenizer, tmp_path)
    assert len(calls) == 5


def saved_copy(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return folder


def test_half_written_cache_is_ignored(tokenizer, tmp_path, monkeypatch):
    def die_after_first_file(file, array):
        np.lib.format.open_memmap(file, mode="w+", dtype=array.dtype, shape=array.shape)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packed.np, "save", die_after_first_file)
        with pytest.raises(KeyboardInterrupt):
            cached_tokens(["ab"], tokenizer, tmp_path)
    # A process killed outright cannot even clean up.
    (tmp_path / "tokens" / ".key.unfinished").mkdir()
    assert cached_tokens(["ab"], tokenizer, tmp_path).tokens.tolist() == [97, 98, EOS_ID]


def test_sample_form():
    sample = PackedTextDataset(STREAM, 4, 100, seed=0, shuffle=False)[13]
    assert sample.keys() == {"tokens", "loss_mask", "sample_index"}
    assert sample["tokens"].tolist() == [12, 13, 14, 15]
    assert (sample["tokens"].dtype, sample["loss_mask"].dtype, sample["sample_index"].dtype) == (
        torch.int64,
        torch.bool,
        torch.int64,
    )
    assert sample["loss_mask"].tolist() == [True] * 4
    assert sample["sample_index"].shape == () and sample["sample_index"] == 13
    batch = default_collate([sample, sample])
    assert batch["tokens"].shape == batch["loss_mask"].shape == (2, 4)
    assert batch["sample_index"].tolist() == [13, 13]


def test_samples_do_not_alias_the_stream():
    stream = STREAM.astype(np.int64)
    PackedTextDataset(stream, 4, 10, seed=0)[0]["tokens"].zero_()
    ValidationDataset(stream, 4)[1]["tokens"].zero_()
    np.testing.assert_array_equal(stream, STREAM)


def test_each_epoch_has_every_row_once_in_another_order():
    dataset = PackedTextDataset(STREAM, 4, 50, seed=3)
    epochs = [tuple(rows_of(dataset, range(start, start + 10))) for start in range(0, 50, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(epochs)) == 5
    assert epochs[2] == tuple(epoch_permutation(10, 3, 2))


def test_order_is_a_function_of_seed_and_index():
    dataset = PackedTextDataset(STREAM, 4, 40, seed=3)
    straight = rows_of(dataset, range(40))
    scrambled = list(np.random.default_rng(0).permutation(40))
    assert rows_of(dataset, scrambled) == [straight[i] for i in scrambled]
    # Longer training and a fresh process (another object) continue the same order, across an epoch border too.
    assert rows_of(PackedTextDataset(STREAM, 4, 1000, seed=3), range(7, 33)) == straight[7:33]
    assert rows_of(PackedTextDataset(STREAM, 4, 40, seed=4), range(40)) != straight
    assert rows_of(PackedTextDataset(STREAM, 4, 40, seed=3, shuffle=False), range(40)) == 4 * list(range(10))


def test_global_random_state_is_untouched():
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    PackedTextDataset(STREAM, 4, 40, seed=3)[11]
    assert torch.equal(torch.get_rng_state(), states[0])
    np.testing.assert_array_equal(np.random.get_state()[1], states[1])


@pytest.mark.parametrize("dataset", [PackedTextDataset(STREAM, 4, 25, seed=0), ValidationDataset(STREAM, 4, 10, 5)])
def test_index_outside_is_an_error(dataset):
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {index} is outside the {len(dataset)} samples"):
            dataset[index]
    assert len(list(dataset)) == len(dataset)


def test_validation_rows_in_order_with_fillers_that_do_not_count():
    dataset = ValidationDataset(STREAM, 4, num_rows=6, multiple_of=4)
    assert (len(dataset), dataset.num_rows) == (8, 6)
    assert rows_of(dataset, range(8)) == [0, 1, 2, 3, 4, 5, 0, 1]
    assert [int(sample["sample_index"]) for sample in dataset] == list(range(8))
    assert [sample["loss_mask"].unique().tolist() for sample in dataset] == [[True]] * 6 + [[False]] * 2


def test_validation_size():
    assert len(ValidationDataset(STREAM, 4)) == 10
    assert len(ValidationDataset(STREAM, 4, num_rows=99)) == 10
    assert len(ValidationDataset(STREAM, 4, num_rows=8, multiple_of=4)) == 8
    assert len(ValidationDataset(STREAM, 4, num_rows=3, multiple_of=16)) == 16


def test_text_shorter_than_a_row_is_an_error():
    assert len(PackedTextDataset(STREAM, 43, 5, seed=0)) == 5
    with pytest.raises(ValueError, match="the training text has 43 tokens, too few for one sequence of seq_length=44"):
        PackedTextDataset(STREAM, 44, 5, seed=0)
    with pytest.raises(ValueError, match="the validation text has 43 tokens.*seq_length=44; .*seq_length=43 at most"):
        ValidationDataset(STREAM, 44)


def test_documents_of_a_row_are_told_apart():
    """Documents of 3, 5 and 1 tokens and a last one, in rows of four; the second row begins inside the second."""
    ends = np.array([3, 8, 9, len(STREAM)])
    for dataset in (
        PackedTextDataset(STREAM, 4, 40, seed=0, shuffle=False, document_ends=ends),
        ValidationDataset(STREAM, 4, document_ends=ends),
    ):
        ids = [dataset[row]["document_ids"].tolist() for row in range(4)]
        assert ids == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]
        assert dataset[0]["document_ids"].dtype == torch.int64


def test_document_ids_follow_the_shuffled_row():
    ends = np.cumsum([3] * 15)
    dataset = PackedTextDataset(STREAM, 4, 40, seed=3, document_ends=ends)
    for index in range(12):
        sample = dataset[index]
        documents_L = sample["tokens"] // 3  # the stream counts from 0
        assert torch.equal(sample["document_ids"], documents_L - documents_L[0])


def test_encoded_documents_end_with_their_end_of_text_token(tokenizer):
    stream = encode_documents(["abc", "d", "ef"], tokenizer)
    dataset = ValidationDataset(stream.tokens, 9, document_ends=stream.document_ends)
    assert dataset[0]["tokens"].tolist() == [97, 98, 99, EOS_ID, 100, EOS_ID, 101, 102, EOS_ID]
    assert dataset[0]["document_ids"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
