"""The form of one sample, shared by all datasets. Legend: L tokens."""

import numpy as np
import torch


def clean_sample(tokens_L: np.ndarray, index: int) -> dict[str, torch.Tensor]:
    """Wrap ids of which all are real and may be masked.

    Args:
        tokens_L: [L] integer ids; copied.
        index: position in consumption order, counted across epochs (training), or the row (validation). Noise is
            drawn from it.

    Returns:
        `tokens` int64 [L], clean ids; `loss_mask` bool [L], True where a token may be masked and counts;
        `sample_index` int64 scalar. Datasets with padding add `key_mask` bool [L], True at real tokens; datasets that
        tell the documents of a row apart add `document_ids` int64 [L].
    """
    return {
        "tokens": torch.from_numpy(tokens_L.astype(np.int64)),
        "loss_mask": torch.ones(len(tokens_L), dtype=torch.bool),
        "sample_index": torch.tensor(index, dtype=torch.int64),
    }


def document_ids(document_ends: np.ndarray, start: int, length: int) -> torch.Tensor:
    """Number the documents of a row of a stream from 0: int64 [length].

    A document that began before the row counts as one of its documents.

    Args:
        document_ends: [num_documents] sorted; the stream position after each document's last token.
        start: stream position of the row's first token.
        length: tokens of the row.
    """
    ids_L = np.searchsorted(document_ends, np.arange(start, start + length), side="right")
    return torch.from_numpy(ids_L - ids_L[0])


def check_index(index: int, num_samples: int) -> None:
    """Raise IndexError outside [0, num_samples).

    Negative indices do not count from the end: the index also decides the noise, so a stray one must not pass.
    """
    if not 0 <= index < num_samples:
        raise IndexError(f"sample {index} is outside the {num_samples} samples of the dataset")
