"""Rows as users give them: checked, and put together as one canvas.

Shape letters: B rows, T canvas positions.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.token_choice import as_token_id

TokenRow = Sequence[int] | Tensor


class Stacked(NamedTuple):
    """Rows under each other; ``key_mask_BT`` is False at padding, None where there is none."""

    tokens_BT: Tensor
    holes_BT: Tensor
    key_mask_BT: Tensor | None


def device_of(rows: Sequence[TokenRow], device: torch.device | str | None) -> torch.device:
    """The model's: the one that is given, or that of the rows."""
    if device is None:
        device = next((row.device for row in rows if isinstance(row, Tensor)), "cpu")
    return torch.device(device)


def as_row(ids: TokenRow, name: str) -> Tensor:
    """Token ids of a row, int64 and on the CPU, where canvases are put together."""
    try:
        row = _as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={ids!r} is no sequence of token ids ({error})") from error
    if row.ndim != 1 or not (row.numel() == 0 or can_hold_ids(row)):
        raise ValueError(
            f"{name} is {row.dtype} of shape {list(row.shape)}; give each row as a sequence of token ids, which are "
            "whole numbers"
        )
    return row.long()


def can_hold_ids(tokens: Tensor) -> bool:
    """Whether a tensor is one of whole numbers."""
    return not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)


def _as_tensor(ids: TokenRow) -> Tensor:
    if isinstance(ids, list) and ids and type(ids[0]) is int:
        # Numpy reads them in a third of the time; what else there may be among them, it cannot.
        with suppress(TypeError, ValueError, RuntimeError):
            array = numpy.asarray(ids)
            if array.dtype == numpy.int64:
                return torch.from_numpy(array)
    return torch.as_tensor(ids, device="cpu")


def as_holes(marks: Sequence[bool] | Tensor, name: str) -> numpy.ndarray:
    """Booleans of a row; 0 and 1 are taken for them, and nothing else, as the places of holes would be."""
    try:
        marks_T = torch.as_tensor(marks, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={marks!r} are no booleans ({error}); give one boolean per token") from error
    if marks_T.ndim != 1:
        raise ValueError(f"{name} is of shape {list(marks_T.shape)}; give one boolean per token")
    holes_T = marks_T.bool()
    if (holes_T != marks_T).any():
        raise ValueError(f"{name}={marks!r} are no booleans; give one boolean per token")
    return holes_T.numpy()


def padding_of(mask_token_id: int, pad_token_id: int | None) -> int:
    """What the canvas behind shorter rows is filled with."""
    mask_token_id = as_token_id("mask_token_id", mask_token_id)
    return mask_token_id if pad_token_id is None else as_token_id("pad_token_id", pad_token_id)


def canvas_of(
    rows: Sequence[Tensor], holes: Sequence[numpy.ndarray], pad_token_id: int, config: SamplerConfig
) -> Stacked:
    """Stack rows left-aligned, so that positions run on from prompt to answer; pads on the right are no keys.

    Holes at the end of a row need no tokens.
    """
    shape = (len(rows), max(map(len, holes)))
    tokens_BT = numpy.full(shape, pad_token_id, dtype=numpy.int64)
    holes_BT, key_mask_BT = numpy.zeros((2, *shape), dtype=bool)
    for row, (tokens_T, holes_T) in enumerate(zip(rows, holes, strict=True)):
        tokens_BT[row, : len(tokens_T)] = tokens_T.numpy()
        holes_BT[row, : len(holes_T)] = holes_T
        key_mask_BT[row, : len(holes_T)] = True
    if config.quirks.pad_ids_are_padding:
        key_mask_BT &= holes_BT | (tokens_BT != pad_token_id)
    elif key_mask_BT.all():
        # A mask that hides nothing would only keep attention off its fast path.
        return Stacked(torch.from_numpy(tokens_BT), torch.from_numpy(holes_BT), None)
    return Stacked(*map(torch.from_numpy, (tokens_BT, holes_BT, key_mask_BT)))
