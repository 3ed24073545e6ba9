"""Likelihood per byte of text, which compares models across tokenizers, and the unigram baseline."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import PreTrainedTokenizerBase

    from nemo_dllm.collections.diffusion.data.packed import PackedTokens


def count_text_bytes(
    texts: Sequence[str], packed: "PackedTokens", num_tokens: int, tokenizer: "PreTrainedTokenizerBase"
) -> int:
    """UTF-8 bytes of the text behind the first `num_tokens` tokens of a stream.

    End-of-text tokens stand for no bytes. Whole documents count exactly; a document that the last row cuts counts up
    to its last whole character inside the row.

    Args:
        texts: the documents of the stream, in order.
        packed: their encoding by `tokenizer`.
        num_tokens: rows in use times tokens per row.
        tokenizer: decodes the part of the cut document.
    """
    num_whole = int(np.searchsorted(packed.document_ends, num_tokens, side="right"))
    whole_bytes = sum(len(text.encode()) for text in texts[:num_whole])
    start = int(packed.document_ends[num_whole - 1]) if num_whole else 0
    part = tokenizer.decode(packed.tokens[start:num_tokens].tolist(), clean_up_tokenization_spaces=False)
    # The decoder shows a character of which some bytes are missing as U+FFFD.
    return whole_bytes + len(part.rstrip("\ufffd").encode())


def count_row_bytes(rows: "Dataset", tokenizer: "PreTrainedTokenizerBase") -> int:
    """UTF-8 bytes of the text behind the tokens of rows that may be masked; special tokens stand for none.

    A character that the border of a row cuts does not count.

    Args:
        rows: a data set of them.
        tokenizer: decodes them.
    """
    texts = (
        tokenizer.decode(
            row["tokens"][row["loss_mask"]].tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        for row in (rows[index] for index in range(len(rows)))
    )
    # The decoder shows each byte of a cut character as U+FFFD.
    return sum(len(text.strip("\ufffd").encode()) for text in texts)


def bits_per_byte(nats_per_token: float, num_tokens: int, num_bytes: int) -> float:
    """Convert a mean negative log-likelihood (or a bound on it) to bits per byte of text.

    Args:
        nats_per_token: mean over `num_tokens` tokens.
        num_tokens: tokens that the mean covers.
        num_bytes: UTF-8 bytes of the same tokens.
    """
    return nats_per_token * num_tokens / (math.log(2.0) * num_bytes)


def unigram_bits_per_byte(
    train_tokens: np.ndarray, validation_tokens: np.ndarray, vocab_size: int, num_bytes: int
) -> float:
    """Bits per byte of a model that knows token frequencies only: the mark that any trained model must beat.

    Cross-entropy of the validation tokens under the training tokens' frequencies with add-one smoothing,
    p(v) = (count(v) + 1) / (num_train_tokens + vocab_size).

    Args:
        train_tokens: [num_train_tokens] ids below `vocab_size`.
        validation_tokens: [num_validation_tokens] ids below `vocab_size`.
        vocab_size: ids that share the probability.
        num_bytes: UTF-8 bytes of the validation tokens.
    """
    train_counts = np.bincount(train_tokens, minlength=vocab_size)
    validation_counts = np.bincount(validation_tokens, minlength=vocab_size)
    log2_probability = np.log2(train_counts + 1.0) - np.log2(len(train_tokens) + vocab_size)
    return float(-(validation_counts * log2_probability).sum() / num_bytes)
