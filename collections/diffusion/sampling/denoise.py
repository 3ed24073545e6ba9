"""The entry to the denoising loop: a canvas with holes, and how they are filled.

Shape letters: B rows, T canvas positions.
"""

from collections.abc import Callable, Iterator, Sequence
from numbers import Integral

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, block_indices
from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.device import works_apart
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn
from nemo_dllm.collections.diffusion.sampling.noise import GlobalNoise, RowNoise
from nemo_dllm.collections.diffusion.sampling.rows import can_hold_ids
from nemo_dllm.collections.diffusion.sampling.run import DenoisingRun
from nemo_dllm.collections.diffusion.sampling.step import DenoiseStep
from nemo_dllm.collections.diffusion.sampling.stopping import Decode, TextEnds
from nemo_dllm.collections.diffusion.sampling.token_choice import as_token_id


def denoise(
    model: DenoiserFn | CachedDenoiser,
    canvas_BT: Tensor,
    holes_BT: Tensor,
    mask_token_id: int,
    config: SamplerConfig,
    key_mask_BT: Tensor | None = None,
    row_ids: Sequence[int] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    decode: Decode | None = None,
    abandoned: Callable[[], Sequence[bool]] | None = None,
    device: torch.device | str | None = None,
) -> Iterator[DenoiseStep]:
    """Fill the holes of a canvas, one forward pass per step.

    Only holes are ever written, wherever else the mask token occurs. Rows do not influence each other: each has its
    own schedule, block and noise, and a full row stays as it is.

    Args:
        model: scores every token at every position; with ``config.cache`` a ``CachedDenoiser``.
        canvas_BT: int64 token ids; those under holes are ignored.
        holes_BT: bool, positions to fill.
        mask_token_id: token shown to the model at holes; never chosen.
        config: ``max_new_tokens`` is not read.
        key_mask_BT: bool, False at padding; handed to the model.
        row_ids: identity of each row, keys its noise together with its seed; None is 0 to B - 1, or 0 for every row
            where ``seeds`` are given. A row sampled alone under its seed and id repeats what it gave in a batch.
        seeds: one per row, in place of ``config.seed``.
        decode: token ids -> text, for ``config.stop_strings``.
        abandoned: asked before every pass which rows nobody waits for any more; they keep the holes that they have.
        device: of the model; None is that of the canvas.

    Returns:
        An iterator over the steps; empty, without any forward pass, if there is no hole. On a GPU, and without
        ``abandoned``, the pass after a step has begun when the step is handed out.

    Raises:
        ValueError: shapes or dtypes disagree, an id is outside the vocabulary, or the model does not fit the cache.
    """
    _check_canvas(canvas_BT, holes_BT, key_mask_BT)
    mask_token_id = as_token_id("mask_token_id", mask_token_id)
    if row_ids is None:
        row_ids = range(len(canvas_BT)) if seeds is None else [0] * len(canvas_BT)
    row_ids = _per_row("row_ids", row_ids, len(canvas_BT))
    if seeds is not None:
        seeds = _per_row("seeds", seeds, len(canvas_BT))
    ends = TextEnds(config, decode)
    device = torch.device(canvas_BT.device if device is None else device)
    if config.quirks.global_noise:
        noise = GlobalNoise(device)
    else:
        noise = RowNoise(config.seed if seeds is None else seeds, row_ids, device)
    keys_BT = torch.ones_like(holes_BT) if key_mask_BT is None else key_mask_BT
    blocks_BT = block_indices(holes_BT, config.block_size, config.counts_blocks_from)
    canvas = Canvas(holes_BT, blocks_BT, keys_BT, padded=key_mask_BT is not None)
    run = DenoisingRun(model, canvas_BT.long(), canvas, mask_token_id, config, noise, ends, device)
    return run.steps(abandoned, ahead=lambda: abandoned is None and works_apart(device))


def _check_canvas(canvas_BT: Tensor, holes_BT: Tensor, key_mask_BT: Tensor | None) -> None:
    if holes_BT.dtype != torch.bool or holes_BT.shape != canvas_BT.shape or canvas_BT.ndim != 2:
        raise ValueError(
            f"holes_BT is {holes_BT.dtype} {list(holes_BT.shape)} for canvas_BT of shape {list(canvas_BT.shape)}; "
            "give both as [rows, positions] and holes_BT as bool"
        )
    if not can_hold_ids(canvas_BT):
        raise ValueError(f"canvas_BT is {canvas_BT.dtype}; give token ids, which are whole numbers, as int64")
    if key_mask_BT is None:
        return
    if key_mask_BT.dtype != torch.bool or key_mask_BT.shape != canvas_BT.shape:
        raise ValueError(
            f"key_mask_BT is {key_mask_BT.dtype} {list(key_mask_BT.shape)} for canvas_BT of shape "
            f"{list(canvas_BT.shape)}; give one bool per position, False at padding"
        )
    if (holes_BT & ~key_mask_BT).any():
        raise ValueError(
            "holes_BT holds positions that key_mask_BT hides, so no prediction could see them; hide padding only"
        )


def _per_row(name: str, values: Sequence[int], rows: int) -> list[int]:
    """Numbers of Python, whatever gave them: those of numpy have no room for seeds of 64 bits."""
    # Arrays and tensors give theirs.
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or not all(isinstance(value, Integral) for value in values):
        given = list(values) if isinstance(values, Sequence) else values
        raise ValueError(f"{name}={given!r} must be whole numbers, one per row")
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} entries for {rows} rows; give one per row")
    return list(map(int, values))
