"""What the rest of the project asks of an objective."""

from typing import Protocol

from torch import Tensor

from nemo_dllm.collections.diffusion.objectives.absorbing import Corruption, ScoredTokens


class Objective(Protocol):
    """How tokens are corrupted and what is optimised. A dataclass of plain values, so that checkpoints can hold it."""

    mask_token_id: int | None
    """Id that stands for a hidden token; None is filled in from the tokenizer."""
    right_shift: bool
    """The logits at position i - 1 predict token i."""
    loss_norm: str
    """What the loss is divided by; ``token`` is the number of tokens that may be masked."""
    group_size: int | None
    """Samples whose times are stratified together; None is filled in with the global batch size."""
    seed: int
    """Of all noise."""
    block_size: int | None
    """Tokens per block, for objectives whose model reads [noised row | clean row]; None: it reads the noised row."""

    @property
    def views(self) -> int:
        """Rows of the model's input per sample."""

    def corrupt(
        self,
        tokens_BL: Tensor,
        loss_mask_BL: Tensor,
        sample_index_B: Tensor,
        *,
        document_BL: Tensor | None = None,
        validation: bool = False,
    ) -> Corruption:
        """Draw the noise of int64 tokens [B, L] where bool [B, L] allows it, by the samples' indices int64 [B]."""

    def score(self, tokens_BL: Tensor, corruption: Corruption) -> ScoredTokens:
        """List the tokens that the model predicts, and where it does."""
