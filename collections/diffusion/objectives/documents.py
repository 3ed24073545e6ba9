"""Where documents and blocks begin in rows that may hold several documents.

Suffixes: B samples, L positions; a row index of 1 stands for rows that are all alike.
"""

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.masks import document_positions


def row_positions(length: int, document_BL: Tensor | None) -> Tensor:
    """Positions within documents: int64 [B, L], or [1, L] without ``document_BL``, where rows are documents."""
    return torch.arange(length)[None] if document_BL is None else document_positions(document_BL)


def segments(position_BL: Tensor, segment_length: int | None) -> Tensor:
    """Number the blocks of each row from 0, through all its documents: int64, shape of ``position_BL``.

    Args:
        position_BL: positions within documents; blocks are counted from each document's start.
        segment_length: positions per block; None numbers whole documents.
    """
    starts_BL = position_BL == 0 if segment_length is None else position_BL % segment_length == 0
    return starts_BL.long().cumsum(dim=1) - 1
