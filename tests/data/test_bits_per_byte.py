import math

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from nemo_dllm.collections.diffusion.data.bits_per_byte import (
    bits_per_byte,
    count_row_bytes,
    count_text_bytes,
    unigram_bits_per_byte,
)
from nemo_dllm.collections.diffusion.data.packed import encode_documents
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer, train_byte_bpe


def test_unigram_against_hand_computation():
    # Training counts 3, 1, 0, 0 and one more each: p = 4/8, 2/8, 1/8, 1/8, i.e. 1, 2, 3, 3 bits.
    train = np.array([0, 0, 0, 1], dtype=np.uint16)
    validation = np.array([0, 1, 1, 2, 3], dtype=np.uint16)
    assert unigram_bits_per_byte(train, validation, vocab_size=4, num_bytes=22) == pytest.approx(11 / 22, rel=1e-12)
    assert unigram_bits_per_byte(train.astype(np.uint32), validation, 4, 11) == pytest.approx(1.0, rel=1e-12)


def test_unigram_is_minimal_at_the_training_frequencies():
    train = np.repeat(np.arange(3), [500, 300, 200])
    bits = [unigram_bits_per_byte(train, np.repeat(np.arange(3), counts), 3, 10) for counts in ([5, 3, 2], [2, 3, 5])]
    entropy = -sum(p * math.log2(p) for p in (0.5, 0.3, 0.2))
    assert bits[0] == pytest.approx(entropy, rel=1e-3) and bits[1] > bits[0]


def test_bits_per_byte_of_a_uniform_model():
    # ln 256 nats for each of 10 byte tokens are 8 bits per byte; twice that when the tokens cover half the bytes.
    assert bits_per_byte(math.log(256), num_tokens=10, num_bytes=10) == pytest.approx(8.0, rel=1e-12)
    assert bits_per_byte(math.log(256), num_tokens=10, num_bytes=5) == pytest.approx(16.0, rel=1e-12)


def test_bytes_of_a_stream_end_anywhere(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "byte"))
    texts = ["ab", "é", "x😀y"]
    encoded = encode_documents(texts, tokenizer)
    # a b . | C3 A9 . | x F0 9F 98 80 y .   with "." the end of text; a character counts once it is whole.
    expected = [0, 1, 2, 2, 2, 4, 4, 5, 5, 5, 5, 9, 10, 10]
    assert len(encoded.tokens) + 1 == len(expected)
    assert [count_text_bytes(texts, encoded, n, tokenizer) for n in range(len(expected))] == expected


def test_bytes_do_not_depend_on_the_tokenizer(tmp_path):
    texts = [f"the {i} cat, don 't <|mask|> é😀 !\n" * 20 for i in range(5)]
    tokenizer = AutoTokenizer.from_pretrained(train_byte_bpe(texts, 300, tmp_path / "bpe"))
    encoded = encode_documents(texts, tokenizer)
    assert count_text_bytes(texts, encoded, len(encoded.tokens), tokenizer) == len("".join(texts).encode())
    for num_tokens in (1, 100, 333, len(encoded.tokens) - 1):
        ids = [token for token in encoded.tokens[:num_tokens].tolist() if token != tokenizer.eos_token_id]
        exact = sum(len(token) for token in tokenizer.convert_ids_to_tokens(ids))
        assert exact - 4 < count_text_bytes(texts, encoded, num_tokens, tokenizer) <= exact


def test_bytes_of_rows_are_those_of_the_tokens_that_count(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path / "bytes"))
    text = list("née, æ".encode())
    # All but the first byte of the last character; the end token is no text.
    row = torch.tensor([*text[:-1], tokenizer.eos_token_id])
    everything, answer = torch.ones(len(row), dtype=torch.bool), torch.arange(len(row)) > 2
    rows = [{"tokens": row, "loss_mask": mask} for mask in (everything, answer, ~everything)]
    assert count_row_bytes(rows, tokenizer) == len("née, ".encode()) + len("e, ")
