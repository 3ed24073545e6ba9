"""What is in the rows of a data set, in numbers."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class RowStatistics:
    """Counts over rows. Shares are of all positions.

    rows, positions: how many there are.
    supervised, padding: share of the positions that are trained, and that hold no real token.
    document_lengths: [num_documents] int64, tokens of each document (each sample, where these are packed) in a row.
    unsupervised_rows: rows without any trained token.
    duplicates: documents that repeat another one's tokens.
    """

    rows: int
    positions: int
    supervised: float
    padding: float
    document_lengths: np.ndarray
    unsupervised_rows: int
    duplicates: int

    @classmethod
    def of(cls, rows: Iterable[dict[str, torch.Tensor]]) -> "RowStatistics":
        """Read the rows, dicts as data sets give them.

        Raises:
            ValueError: there are none.
        """
        positions = supervised = padding = num_rows = unsupervised_rows = 0
        lengths: list[int] = []
        seen: set[bytes] = set()
        for row in rows:
            num_rows += 1
            positions += len(row["tokens"])
            supervised += int(row["loss_mask"].sum())
            unsupervised_rows += not bool(row["loss_mask"].any())
            documents = split_documents_of(row)
            padding += len(row["tokens"]) - sum(map(len, documents))
            lengths += map(len, documents)
            seen.update(hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).digest() for tokens in documents)
        if num_rows == 0:
            raise ValueError("there are no rows to describe")
        return cls(
            num_rows,
            positions,
            supervised / positions,
            padding / positions,
            np.array(lengths),
            unsupervised_rows,
            duplicates=len(lengths) - len(seen),
        )

    def histogram(self, num_bins: int = 12) -> list[tuple[int, int, int]]:
        """Lengths of documents as (shortest, longest, how many) per bin, bins of equal width."""
        shortest, longest = int(self.document_lengths.min()), int(self.document_lengths.max())
        width = -(-(longest - shortest + 1) // num_bins)
        counts = np.bincount((self.document_lengths - shortest) // width)
        return [(shortest + i * width, shortest + (i + 1) * width - 1, int(count)) for i, count in enumerate(counts)]


def split_documents_of(row: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The real tokens of a row, document by document."""
    tokens = row["tokens"]
    key_mask = row.get("key_mask", torch.ones(len(tokens), dtype=torch.bool))
    document_ids = row.get("document_ids", torch.zeros_like(tokens))[key_mask]
    if len(document_ids) == 0:
        return []
    lengths = torch.unique_consecutive(document_ids, return_counts=True)[1]
    return list(tokens[key_mask].split(lengths.tolist()))
