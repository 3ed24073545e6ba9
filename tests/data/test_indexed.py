"""Our reader on files in Megatron-LM's layout, written by Megatron's own builder, and on damaged ones."""

import struct

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from nemo_dllm.collections.diffusion.data.indexed import TokenFile, check_corpus
from nemo_dllm.collections.diffusion.data.pretraining import DocumentStream
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer

# Documents of 1, 2 and 1 sequences.
SEQUENCES = [[[5, 6, 7]], [[1], [2, 3]], [[9, 8, 7, 6]]]
STREAM = [5, 6, 7, 1, 2, 3, 9, 8, 7, 6]


@pytest.fixture(params=[np.uint16, np.int32, np.int64])
def prefix(tmp_path, request):
    return build(tmp_path / "corpus", request.param)


def build(prefix, dtype=np.int32, documents=SEQUENCES):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        for sequence in sequences:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_stream_and_documents(prefix):
    tokens = TokenFile(prefix)
    assert (tokens.num_tokens, tokens.num_documents) == (10, 3)
    assert tokens.read(0, 10).tolist() == STREAM
    assert tokens.read(2, 5).tolist() == STREAM[2:5]
    assert [tokens.document_start(document) for document in range(4)] == [0, 3, 6, 10]
    assert [tokens.document_at(position) for position in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    tokens.check_tokens(10)


def test_suffixes_are_forgiven(tmp_path):
    build(tmp_path / "corpus")
    assert TokenFile(f"{tmp_path}/corpus.bin").num_tokens == TokenFile(f"{tmp_path}/corpus.idx").num_tokens == 10


def test_ids_outside_the_vocabulary_are_named_by_place(tmp_path):
    tokens = TokenFile(build(tmp_path / "corpus"))
    with pytest.raises(
        ValueError, match=r"corpus.bin: token 0 of document 2 is 9, outside the vocabulary of 9; it was"
    ):
        tokens.check_tokens(9)
    with pytest.raises(ValueError, match="token 2 of document 0 is 7, outside the vocabulary of 7"):
        tokens.check_ids(tokens.read(1, 4), 1, 7)
    negative = TokenFile(build(tmp_path / "negative", documents=[[[1, -2]]]))
    with pytest.raises(ValueError, match="token 1 of document 0 is -2"):
        negative.check_tokens(9)


def damage(tmp_path, suffix, change):
    prefix = build(tmp_path / "corpus")
    file = tmp_path / f"corpus{suffix}"
    file.write_bytes(change(file.read_bytes()))
    return prefix


@pytest.mark.parametrize(
    "suffix, change, message",
    [
        (".bin", lambda content: content[:-4], r"corpus.bin has 36 bytes, but .*corpus.idx describes 40"),
        (".bin", lambda content: content + b"1234", r"corpus.bin has 44 bytes, but .*corpus.idx describes 40"),
        (".bin", lambda content: b"", "corpus.bin is empty"),
        (".idx", lambda content: content[:-1], r"corpus.idx has 113 bytes instead of 114: it is cut short"),
        (".idx", lambda content: content[:20], "corpus.idx is not an index of Megatron-LM"),
        (".idx", lambda content: b"X" + content[1:], "corpus.idx is not an index of Megatron-LM"),
        (".idx", lambda content: content[:9] + struct.pack("<Q", 2) + content[17:], "version 2 and token type 4"),
        (".idx", lambda content: content[:18] + struct.pack("<Q", 0) + content[26:], "lists no documents"),
        (".idx", lambda content: content[:-8] + struct.pack("<Q", 3), "documents do not cover its 4 sequences"),
    ],
)
def test_damaged_files(tmp_path, suffix, change, message):
    with pytest.raises(ValueError, match=message):
        TokenFile(damage(tmp_path, suffix, change))


@pytest.mark.parametrize(
    "offset, number, message",
    [
        (34 + 4, struct.pack("<i", 2), r"corpus.idx: sequence 2 does not begin where it should; write it anew"),
        (34 + 16 + 8, struct.pack("<q", 2**40), "sequence 1 does not begin"),
        (34 + 16 + 32 + 8, struct.pack("<q", 4), "document 1 does not begin"),
    ],
)
def test_damage_inside_an_index_is_found_by_the_check(tmp_path, offset, number, message):
    """Opening reads its ends only."""

    def change(content):
        return content[:offset] + number + content[offset + len(number) :]

    prefix = damage(tmp_path, ".idx", change)
    assert TokenFile(prefix).num_tokens == 10
    with pytest.raises(ValueError, match=message):
        check_corpus(prefix, byte_tokenizer(tmp_path / "byte"))


def test_documents_beyond_four_gigabytes(tmp_path):
    """In a file with holes: a first document of 3 billion tokens, and a short one behind it."""
    long = 2**31 - 1
    builder = IndexedDatasetBuilder(f"{tmp_path / 'corpus'}.bin", dtype=np.uint16)
    builder.sequence_lengths = np.array([long, long, 3], dtype=np.int32)
    builder.document_indices = np.array([0, 2, 3])
    builder.finalize(f"{tmp_path / 'corpus'}.idx")
    with open(tmp_path / "corpus.bin", "r+b") as file:
        file.seek(2 * 2 * long)
        file.write(np.array([7, 8, 9], dtype=np.uint16).tobytes())
    corpus = TokenFile(tmp_path / "corpus")
    corpus.check_index()
    assert [corpus.document_start(document) for document in range(3)] == [0, 2 * long, 2 * long + 3]
    piece = DocumentStream(corpus, 0, 2, vocab_size=10, bos_token_id=5).read(2 * long - 1, 8)
    assert piece.tokens.tolist() == [0, 0, 5, 7, 8, 9, 5, 0]
    assert piece.documents.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert piece.is_begin.tolist() == [False, False, True, False, False, False, True, False]


def test_missing_files(tmp_path):
    build(tmp_path / "corpus")
    (tmp_path / "corpus.idx").unlink()
    with pytest.raises(FileNotFoundError, match=r"corpus.idx' does not exist; name the path of a .bin and .idx pair"):
        TokenFile(tmp_path / "corpus")


def test_pickles_as_its_files(prefix):
    import pickle

    tokens = TokenFile(prefix)
    assert len(pickle.dumps(tokens)) < 1000
    assert pickle.loads(pickle.dumps(tokens)).read(0, 10).tolist() == STREAM


def test_check_of_a_corpus(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "byte")
    assert check_corpus(build(tmp_path / "a"), tokenizer) == (
        "3 documents, 10 tokens, 3 per document, all ids below 258"
    )
    with pytest.raises(ValueError, match="token 1 of document 0 is 258, outside the vocabulary of 258"):
        check_corpus(build(tmp_path / "b", documents=[[[257, 258]]]), tokenizer)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_are_no_ids(tmp_path, dtype):
    with pytest.raises(ValueError, match="known are version 1 and the integer types 1, 2, 3, 4, 5, 8"):
        TokenFile(build(tmp_path / "corpus", dtype))


def test_a_multimodal_corpus_is_refused(tmp_path):
    builder = IndexedDatasetBuilder(f"{tmp_path / 'corpus'}.bin", dtype=np.int32, multimodal=True)
    builder.add_item(torch.tensor([1, 2]), mode=1)
    builder.end_document()
    builder.finalize(f"{tmp_path / 'corpus'}.idx")
    with pytest.raises(ValueError, match=r"corpus.idx is of a multimodal corpus"):
        TokenFile(tmp_path / "corpus")
