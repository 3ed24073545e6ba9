"""Logits of the positions that a step asks for: from the whole canvas, or with keys and values kept from earlier steps.

A scorer is told the block of each row at hand where one of them moves on, ``begin(tokens_BT, blocks)``, and called
for each step as (tokens_BT, places) -> logits_NV: the canvas, and the places to score, ascending (some of the active
ones, counted row after row). ``rehearse`` does of a call, without any effect, what the CPU does before the model gets
it; see ``DenoisingRun``. The tensors that it gets are on the CPU, where looking into them costs little; the logits
are on the model's device, and it never waits for that. One whose rows can be moved between passes has ``join_rows``
(see ``joining``), after which ``begin`` comes first.

Shape letters: B rows, T canvas positions, L positions of one pass, N scored positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.approximate_caches import ApproximateCache, DelayedCache
from nemo_dllm.collections.diffusion.sampling.blocks import Canvas
from nemo_dllm.collections.diffusion.sampling.committed_blocks import CommittedBlocks
from nemo_dllm.collections.diffusion.sampling.config import DELAYED, SamplerConfig
from nemo_dllm.collections.diffusion.sampling.device import on_device
from nemo_dllm.collections.diffusion.sampling.joining import Picked, attribute_of, join_attribute, stack_rows
from nemo_dllm.collections.diffusion.sampling.model_function import CachedDenoiser, DenoiserFn

_LARGEST = torch.finfo(torch.float32).max


class Scorer(Protocol):
    """See above."""

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None: ...

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor: ...

    def rehearse(self, tokens_BT: Tensor, places: Sequence[int]) -> None: ...


class WholeCanvas:
    """Every step sees the whole canvas."""

    def __init__(self, model: DenoiserFn, canvas: Canvas, right_shift: bool, device: torch.device):
        self._model, self._right_shift, self._device = model, right_shift, device
        # A mask that hides nothing would only keep attention off its fast path.
        self._key_mask_BT = on_device(canvas.keys_BT, device) if canvas.padded else None

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], canvas: Canvas) -> "WholeCanvas":
        """For rows of several runs, of which it keeps nothing."""
        first = picked[0].part
        return cls(first._model, canvas, first._right_shift, first._device)

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None:
        """Blocks make no difference."""

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor:
        tokens_BT, rows_N, positions_N = self._on_device(tokens_BT, places)
        if hasattr(self._model, "score_positions"):
            return self._model.score_positions(tokens_BT, rows_N, positions_N, key_mask_BT=self._key_mask_BT)
        logits_BTV = self._model(tokens_BT, key_mask_BT=self._key_mask_BT)
        if not isinstance(logits_BTV, Tensor) or logits_BTV.ndim != 3 or logits_BTV.shape[:2] != tokens_BT.shape:
            what = list(logits_BTV.shape) if isinstance(logits_BTV, Tensor) else type(logits_BTV).__name__
            raise ValueError(
                f"the model returned {what} for tokens of shape {list(tokens_BT.shape)}; return logits as one tensor "
                "[rows, positions, vocabulary]"
            )
        return logits_BTV[rows_N, positions_N]

    def rehearse(self, tokens_BT: Tensor, places: Sequence[int]) -> None:
        """What a step begins with."""
        self._on_device(tokens_BT, places)

    def _on_device(self, tokens_BT: Tensor, places: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """A copy of the canvas, and the rows and positions [N] to score, brought to the device as one."""
        rows_N, positions_N = divmod(numpy.array(places), tokens_BT.shape[1])
        if self._right_shift:
            positions_N = (positions_N - 1).clip(0)
        packed = numpy.concatenate([tokens_BT.numpy().reshape(-1), rows_N, positions_N])
        sizes = [tokens_BT.numel(), len(places), len(places)]
        tokens, rows_N, positions_N = on_device(torch.from_numpy(packed), self._device).split(sizes)
        return tokens.view(tokens_BT.shape), rows_N, positions_N


class Guided:
    """Classifier-free guidance: u + (scale + 1) * (c - u), u from a canvas whose given tokens are masked.

    Nichol and Ho guidance of Nie et al. 2024, "Scaling up masked diffusion models on text". Each branch has a cache of
    its own, and the padding of its row.
    """

    def __init__(self, make: Callable[[], Scorer], hidden_BT: Tensor, mask_token_id: int, scale: float):
        self._conditional, self._unconditional = make(), make()
        self._hidden_BT, self._mask_token_id, self._scale = hidden_BT, mask_token_id, scale

    @property
    def row_parts(self) -> tuple[Any, ...]:
        """See ``joining``."""
        return (self._conditional, self._unconditional)

    @classmethod
    def join_rows(cls, picked: Sequence[Picked], canvas: Canvas) -> "Guided":
        """For rows of several runs; each branch joins its own."""
        joined = copy(picked[0].part)
        joined._conditional = join_attribute(picked, "_conditional", canvas)
        joined._unconditional = join_attribute(picked, "_unconditional", canvas)
        joined._hidden_BT = stack_rows(attribute_of(picked, "_hidden_BT"), canvas.keys_BT.shape[1])
        return joined

    def begin(self, tokens_BT: Tensor, blocks: Sequence[int | None]) -> None:
        """Each branch by itself."""
        for branch, branch_BT in self._branches(tokens_BT):
            branch.begin(branch_BT, blocks)

    def __call__(self, tokens_BT: Tensor, places: Sequence[int]) -> Tensor:
        # Infinity in both, as of a token that the model never gives, has no difference.
        conditional_NV, unconditional_NV = (
            branch(branch_BT, places).float().clamp(-_LARGEST, _LARGEST)
            for branch, branch_BT in self._branches(tokens_BT)
        )
        return unconditional_NV + (self._scale + 1) * (conditional_NV - unconditional_NV)

    def rehearse(self, tokens_BT: Tensor, places: Sequence[int]) -> None:
        """Each branch by itself."""
        for branch, branch_BT in self._branches(tokens_BT):
            branch.rehearse(branch_BT, places)

    def _branches(self, tokens_BT: Tensor) -> tuple[tuple[Scorer, Tensor], ...]:
        hidden_BT = tokens_BT.masked_fill(self._hidden_BT, self._mask_token_id)
        return (self._conditional, tokens_BT), (self._unconditional, hidden_BT)


_SCORERS = {
    None: WholeCanvas,
    "exact": CommittedBlocks,
    "approximate_prefix": partial(ApproximateCache, keep_suffix=False),
    "approximate_dual": partial(ApproximateCache, keep_suffix=True),
}


def build_scorer(
    model: DenoiserFn | CachedDenoiser,
    tokens_BT: Tensor,
    canvas: Canvas,
    mask_token_id: int,
    config: SamplerConfig,
    device: torch.device,
) -> Scorer:
    """The scorer that ``config.cache`` and ``config.cfg_scale`` ask for, of a model on ``device``.

    Raises:
        ValueError: the model cannot do what the cache needs.
    """
    needed = ("new_cache", "score_and_keep") if config.cache == DELAYED else ("new_cache", "denoise", "commit")
    if config.cache is not None and not all(hasattr(model, name) for name in needed):
        raise ValueError(
            f"cache={config.cache!r} needs a model with {', '.join(needed[:-1])} and {needed[-1]} (see CachedDenoiser),"
            f" and this one is a {type(model).__name__}; leave cache None"
        )

    def make() -> Scorer:
        if config.cache == DELAYED:
            return DelayedCache(
                model,
                canvas,
                config.right_shift,
                device,
                mask_token_id=mask_token_id,
                refresh_interval=config.refresh_interval,
            )
        return _SCORERS[config.cache](model, canvas, config.right_shift, device)

    if config.cfg_scale == 0:
        return make()
    keep = torch.tensor(config.cfg_keep_token_ids, dtype=tokens_BT.dtype, device="cpu")
    hidden_BT = canvas.keys_BT & ~canvas.holes_BT & ~torch.isin(tokens_BT, keep)
    return Guided(make, hidden_BT, mask_token_id, config.cfg_scale)
