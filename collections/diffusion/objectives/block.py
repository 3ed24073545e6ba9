"""Block diffusion: blocks of text one after the other, the tokens of a block by masked diffusion.

Suffixes: B samples, R rows of the model's input, L positions.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.objectives.absorbing import AbsorbingDiffusion, Corruption, ScoredTokens
from nemo_dllm.collections.diffusion.objectives.losses import LOSS_NORMS
from nemo_dllm.collections.diffusion.objectives.registry import look_up
from nemo_dllm.collections.diffusion.objectives.times import BLOCK_TIMES, TimeSampling

# block_start -> whether the logits come from the clean copy.
BLOCK_STARTS = {"clean_prefix": True, "reference": False}


@dataclass
class BlockDiffusion(AbsorbingDiffusion):
    """Block diffusion (Arriola et al. 2025, "Block Diffusion"); defaults give the NELBO per token.

    The model reads [noised row | clean row]: a noised block sees itself and the clean blocks before it. Blocks are
    counted from the start of each document; the last one may be short.

    Args:
        block_size: tokens per block, at least 1. With blocks as long as a row this is :class:`MaskedDiffusion`.
        time_sampling: beside those of ``MaskedDiffusion``, ``antithetic_per_block`` (the default, as in the paper) and
            ``iid_per_block`` draw a time for each block.
        block_start: which logits predict the first token of a block under ``right_shift``. ``clean_prefix``: those of
            the last token before it in the clean copy, which is what samplers read. ``reference``: those of that token
            in the noised row, where it may be masked, as in dllm and Fast-dLLM v2.
        ar_loss_weight: weight of an added next-token loss: in the clean copy the logits at position i - 1 predict
            token i, for every maskable token but the first of a document. Both losses are sums over tokens with one
            denominator. A clean block that sees its own later tokens would give the answer away, so a positive weight
            makes the clean copy causal (as in Gat et al. 2025, "Set Block Decoding"), for samplers too: the blocks
            that they have finished must then attend causally.

    All other fields: see :class:`AbsorbingDiffusion`.
    """

    time_sampling: str = "antithetic_per_block"
    block_size: int = 32
    block_start: str = "clean_prefix"
    ar_loss_weight: float = 0.0

    time_samplings: ClassVar[dict[str, TimeSampling]] = BLOCK_TIMES

    def __post_init__(self):
        super().__post_init__()
        look_up("block_start", self.block_start, BLOCK_STARTS)
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be at least 1; 4 and 32 are usual")
        if not 0 <= self.ar_loss_weight < math.inf:
            raise ValueError(
                f"ar_loss_weight={self.ar_loss_weight} must not be negative; 0 is no next-token loss, infinity none"
            )

    @property
    def causal_clean(self) -> bool:
        """The clean copy attends causally instead of by blocks."""
        return self.ar_loss_weight > 0

    @property
    def scores_clean(self) -> bool:
        """Some logits stand in the clean copy, so the last layer must compute it."""
        return self.causal_clean or (self.right_shift and BLOCK_STARTS[self.block_start])

    def score(self, tokens_BL: Tensor, corruption: Corruption) -> ScoredTokens:
        """As for masked diffusion, and the tokens of the next-token loss.

        Positions of logits from L on are those of the clean copy.
        """
        scored = super().score(tokens_BL, corruption)
        if self.right_shift and BLOCK_STARTS[self.block_start]:
            position_RL = corruption.position.expand(len(tokens_BL), -1).repeat(self.views, 1)
            starts = position_RL[scored.row, scored.position + 1] % self.block_size == 0
            scored = scored._replace(position=scored.position + starts * tokens_BL.shape[1])
        if self.ar_loss_weight > 0:
            pairs = zip(scored, self._next_tokens(tokens_BL, corruption), strict=True)
            scored = ScoredTokens(*map(torch.cat, pairs))
        return scored

    def _next_tokens(self, tokens_BL: Tensor, corruption: Corruption) -> ScoredTokens:
        # The clean copies of all views are the same; the first view's is scored.
        maskable_BL = corruption.maskable[: len(tokens_BL)]
        row, position = (maskable_BL & (corruption.position > 0)).nonzero(as_tuple=True)
        scale_B1, _ = LOSS_NORMS[self.loss_norm](maskable_BL)
        loss_weight = self.ar_loss_weight * scale_B1[row, 0]
        return ScoredTokens(
            row=row,
            position=tokens_BL.shape[1] + position - 1,
            token=tokens_BL[row, position],
            loss_weight=loss_weight,
            nll_weight=torch.zeros_like(loss_weight),
            time=torch.zeros_like(loss_weight),
        )
