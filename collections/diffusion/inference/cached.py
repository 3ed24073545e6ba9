"""A Megatron model as what samplers call: over the whole canvas, or over a few positions with a cache of the others.

Shape letters: B rows, T canvas positions, L positions of one pass, S cache slots, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal
from nemo_dllm.collections.diffusion.inference.cache_pool import SHARE, CachePool, PooledCache, recorded_length
from nemo_dllm.collections.diffusion.inference.cache_views import See, see_all, see_held
from nemo_dllm.collections.diffusion.inference.recorded import RecordedPasses, Recorder
from nemo_dllm.collections.diffusion.models.core import DiffusionCore
from nemo_dllm.collections.diffusion.sampling import KVCache

COMMITTED_AT_ONCE = 1 << 15
"""Tokens that one pass encodes, of all rows together: what their layers hold meanwhile grows with it."""
RECORDED_AT_ONCE = 1 << 12
"""Tokens of a pass, of all rows together, up to which launching it takes longer than running it."""
FULL_PASS = 256
"""Tokens of a pass that keep a GPU busy: with fewer it reads the weights for longer than it computes."""


class MegatronDenoiser:
    """A ``sampling.DenoiserFn`` and a ``sampling.CachedDenoiser`` in one.

    A pass with a cache runs the layers on the given positions alone; Megatron's inference engine has no part in it.
    On a GPU small passes are recorded and replayed; with experts, whose loads the host must know, they are not. Memory
    of caches that are gone is kept for that, up to an eighth of the GPU's, as long as this object lives.

    Args:
        core: the model, whole, in evaluation mode.
        block_size: tokens of a block, for models that are block-causal; None for bidirectional ones.
        causal_commits: committed tokens see only those before them, as the clean tokens of a block diffusion model did
            that was trained with a next-token loss.
        record: whether small passes are; by one thread at a time, and a model that is moved to another device
            afterwards needs a new denoiser.
    """

    def __init__(
        self,
        core: DiffusionCore,
        block_size: int | None = None,
        causal_commits: bool = False,
        *,
        record: bool = True,
    ):
        self.core, self.block_size, self.causal_commits = core, block_size, causal_commits
        config = core.config
        one_rank = config.tensor_model_parallel_size == config.pipeline_model_parallel_size == 1
        self._records = record and one_rank and not config.num_moe_experts
        self._recorded: Recorded | None = None
        self._encoded: torch.cuda.Event | None = None

    @property
    def vocabulary_size(self) -> int:
        """Tokens, without padding rows."""
        return self.core.logical_vocab_size

    @property
    def full_pass(self) -> int:
        """See ``CachedDenoiser``; passes that are not recorded take the time of launching them, however small."""
        return FULL_PASS if self._records and next(self.core.parameters()).is_cuda else RECORDED_AT_ONCE

    @torch.no_grad()
    def __call__(self, tokens_BT: Tensor, *, key_mask_BT: Tensor | None = None) -> Tensor:
        """Score every token at every position of the canvas.

        Args:
            tokens_BT: int64 on the model's device, the mask token where unknown.
            key_mask_BT: bool, True where a position may be attended to; None means everywhere.

        Returns:
            Logits [B, T, V] over the tokens, without padding rows, in the model's dtype.

        Raises:
            ValueError: with ``causal_commits``: no mask says where the block at hand begins.
        """
        return self._logits(self._encode(tokens_BT, key_mask_BT))

    @torch.no_grad()
    def score_positions(
        self, tokens_BT: Tensor, rows_N: Tensor, positions_N: Tensor, *, key_mask_BT: Tensor | None = None
    ) -> Tensor:
        """As a call, but the logits [N, V] of some entries of the canvas only; see ``DenoiserFn``."""
        at_N = positions_N * len(tokens_BT) + rows_N
        return self._logits(self._encode(tokens_BT, key_mask_BT), at_N)

    def nearly_done(self) -> None:
        """Wait until the last pass is through all layers; what the head takes is what is left. See ``DenoiserFn``."""
        if self._encoded is not None:
            self._encoded.synchronize()

    def _logits(self, hidden_TBH: Tensor, at_N: Tensor | None = None) -> Tensor:
        """Logits of hidden states; on a GPU what comes before them is marked."""
        if hidden_TBH.is_cuda:
            self._encoded = torch.cuda.current_stream(hidden_TBH.device).record_event(self._encoded)
        return self.core.logits(hidden_TBH, at_N)

    def _encode(self, tokens_BT: Tensor, key_mask_BT: Tensor | None) -> Tensor:
        """Hidden states [T, B, H] of a canvas."""

        def run(tokens_BT: Tensor, key_mask_BT: Tensor | None = None) -> Tensor:
            # Positions of its own: what patterns and Megatron make of sizes alone is kept, and dropped, elsewhere.
            positions_BT = torch.arange(tokens_BT.size(1), device=tokens_BT.device).expand_as(tokens_BT)
            return self.core.encode(tokens_BT, positions_BT, self._pattern(positions_BT, key_mask_BT))

        inputs = (tokens_BT,) if key_mask_BT is None else (tokens_BT, key_mask_BT)
        if self._is_recorded(tokens_BT.device, tokens_BT.numel()):
            work = partial(self._on(tokens_BT.device).canvases, "canvas", run, run, *inputs)
        else:
            work = partial(run, *inputs)
        return work() if self._recorded is None else self._recorded.caches.with_room(work)

    def _pattern(self, positions_BT: Tensor, key_mask_BT: Tensor | None) -> Bidirectional | BlockCausal:
        if self.block_size is None:
            return Bidirectional(key_mask_BT)
        if self.causal_commits:
            raise ValueError(
                "cache=None cannot be used with this model: finished blocks attend causally, the block at hand does "
                "not, as in its training with ar_loss_weight above 0; set cache='exact'"
            )
        return BlockCausal(self.block_size, key_mask_BL=key_mask_BT, position_BL=positions_BT)

    def new_cache(self, rows: int, positions: int) -> KVCache:
        """An empty cache on the model's device; see ``CachedDenoiser``."""
        device = next(self.core.parameters()).device
        if not self._records or device.type != "cuda":
            return KVCache(rows, positions, device)
        return self._on(device).caches.new_cache(rows, positions)

    @torch.no_grad()
    def denoise(self, tokens_BL: Tensor, positions_BL: Tensor, cache: KVCache, *, key_mask_BL: Tensor) -> Tensor:
        """Logits [B, L, V] of the given positions, which see the cache and each other; see ``CachedDenoiser``."""

        def run(see: See, tokens_BL: Tensor, positions_BL: Tensor, key_mask_BL: Tensor) -> Tensor:
            window = cache.window(positions_BL, key_mask_BL)
            return self.core.encode(tokens_BL, positions_BL, see(cache, window))

        hidden_LBH = self._run_with(cache, "denoise", run, tokens_BL, positions_BL, key_mask_BL)
        return self._logits(hidden_LBH[: tokens_BL.size(1), : len(tokens_BL)])

    @torch.no_grad()
    def score_and_keep(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        cache: KVCache,
        rows_N: Tensor,
        columns_N: Tensor,
        *,
        key_mask_BL: Tensor,
        kept_BL: Tensor,
    ) -> Tensor:
        """Logits [N, V] of some of the given positions, of which the cache keeps some; see ``CachedDenoiser``."""
        given = (tokens_BL, positions_BL, key_mask_BL, kept_BL)
        return self._score_and_keep("score and keep", cache, rows_N, columns_N, *given)

    @torch.no_grad()
    def commit_and_score(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        cache: KVCache,
        rows_N: Tensor,
        columns_N: Tensor,
        *,
        key_mask_BL: Tensor,
        blocks_BL: Tensor,
        kept_BL: Tensor,
    ) -> Tensor:
        """Logits [N, V] of blocks behind those that the cache keeps, in one pass; see ``JointDenoiser``."""
        if self.causal_commits:
            # The block at hand sees all.
            blocks_BL = positions_BL.where(kept_BL, positions_BL.amax(dim=1, keepdim=True))
        given = (tokens_BL, positions_BL, key_mask_BL, kept_BL, blocks_BL)
        return self._score_and_keep("commit and score", cache, rows_N, columns_N, *given)

    def _score_and_keep(
        self, name: str, cache: KVCache, rows_N: Tensor, columns_N: Tensor, *inputs_BL: Tensor
    ) -> Tensor:
        """One pass over tokens, positions, a key mask, what is kept, and blocks if any."""

        def run(
            see: See, tokens_BL: Tensor, positions_BL: Tensor, key_mask_BL: Tensor, kept_BL: Tensor, *blocks_BL: Tensor
        ) -> Tensor:
            window = cache.window(positions_BL, key_mask_BL, *blocks_BL)
            hidden_LBH = self.core.encode(tokens_BL, positions_BL, see(cache, window))
            cache.hold(window, kept_BL)
            return hidden_LBH

        hidden_LBH = self._run_with(cache, name, run, *inputs_BL)
        return self._logits(hidden_LBH, columns_N * hidden_LBH.size(1) + rows_N)

    @torch.no_grad()
    def commit(
        self, tokens_BL: Tensor, positions_BL: Tensor, cache: KVCache, *, key_mask_BL: Tensor, blocks_BL: Tensor
    ) -> Tensor:
        """Encode tokens, keep them, and return the last logits of each row, [B, V]; see ``CachedDenoiser``.

        Long prompts are encoded in parts of whole blocks, so that their number does not decide on the memory needed.
        """
        if self.causal_commits:
            blocks_BL = positions_BL

        def run(see: See, tokens_BL: Tensor, positions_BL: Tensor, key_mask_BL: Tensor, blocks_BL: Tensor) -> Tensor:
            window = cache.window(positions_BL, key_mask_BL, blocks_BL)
            rows = torch.arange(len(tokens_BL), device=tokens_BL.device)
            at_B = (key_mask_BL.sum(dim=1) - 1).clamp_min(0) * len(rows) + rows
            logits_BV = self.core(tokens_BL, positions_BL, see(cache, window), logits_at_N=at_B)
            cache.hold(window)
            return logits_BV

        logits_BV = None
        given_BL = (tokens_BL, positions_BL, key_mask_BL, blocks_BL)
        parts = _whole_blocks(blocks_BL, key_mask_BL, max(COMMITTED_AT_ONCE // len(tokens_BL), 1))
        for part in parts:
            # As they are where that is all: a recorded pass knows inputs again that it has had.
            given = given_BL if len(parts) == 1 else [x_BL[:, part] for x_BL in given_BL]
            part_BV = self._run_with(cache, "commit", run, *given)[: len(tokens_BL)]
            if logits_BV is None:
                logits_BV = part_BV
            else:
                logits_BV = torch.where(key_mask_BL[:, part].any(dim=1, keepdim=True), part_BV, logits_BV)
        return logits_BV

    def _run_with(
        self, cache: KVCache, name: str, run: Callable[..., Tensor], tokens_BL: Tensor, *inputs: Tensor
    ) -> Tensor:
        """``run(see, tokens, *inputs)``, recorded where that pays."""
        if not isinstance(cache, PooledCache):
            return run(see_held, tokens_BL, *inputs)
        return cache.pool.with_room(partial(self._run_pooled, cache, name, run, tokens_BL, *inputs))

    def _run_pooled(
        self, cache: PooledCache, name: str, run: Callable[..., Tensor], tokens_BL: Tensor, *inputs: Tensor
    ) -> Tensor:
        """A pass that may be recorded, then maybe over further rows and positions, all idle."""
        inputs_BL = (tokens_BL, *inputs)
        # A cache gets its memory from the first pass that gets through all layers.
        if len(cache.memory.layers) < len(self.core.decoder.layers):
            return run(see_held, *inputs_BL)
        (given_rows, given_length), rows = tokens_BL.shape, len(cache.held_BS)
        length = recorded_length(given_length, varies=name == "commit")
        if not self._is_recorded(tokens_BL.device, rows * length):
            return run(see_held, *inputs_BL)
        if (rows, length) != tokens_BL.shape:
            idle = (0, length - given_length, 0, rows - given_rows)
            inputs_BL = [F.pad(x_BL, idle) for x_BL in inputs_BL]
        kind = (name, cache.held_BS.shape)
        return cache.passes(kind, partial(run, see_held), partial(run, see_all), *inputs_BL)

    def _is_recorded(self, device: torch.device, tokens: int) -> bool:
        """Whether a pass over so many tokens takes longer to launch than to run."""
        return self._records and device.type == "cuda" and tokens <= RECORDED_AT_ONCE

    def _on(self, device: torch.device) -> "Recorded":
        """What is recorded, of a model on this GPU."""
        if self._recorded is None:
            recorder = Recorder(device)
            most_bytes = torch.cuda.get_device_properties(device).total_memory // SHARE
            self._recorded = Recorded(RecordedPasses(recorder), CachePool(recorder, device, most_bytes))
        return self._recorded


class Recorded(NamedTuple):
    """Recorded passes of a model.

    Attributes:
        canvases: those without a cache.
        caches: those with one.
    """

    canvases: RecordedPasses
    caches: CachePool


def _whole_blocks(blocks_BL: Tensor, key_mask_BL: Tensor, longest: int) -> list[slice]:
    """Cut the positions where all rows begin a block, into parts of at most ``longest`` where blocks allow."""
    length = blocks_BL.size(1)
    if length <= longest:
        return [slice(0, length)]
    begins_BL = (blocks_BL[:, 1:] != blocks_BL[:, :-1]) | ~key_mask_BL[:, 1:]
    cuts = [*(begins_BL.all(dim=0).nonzero()[:, 0] + 1).tolist(), length]
    parts, start = [], 0
    for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
        if following is None or following - start > longest:
            parts.append(slice(start, cut))
            start = cut
    return parts
