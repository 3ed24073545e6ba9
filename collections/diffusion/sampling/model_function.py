"""What a sampler needs from a model: one function from tokens to logits."""

from typing import Protocol

from torch import Tensor


class DenoiserFn(Protocol):
    """A masked denoiser, seen as a function. Shape letters: B rows, T positions, V vocabulary.

    Position ids, caches and other inputs join as further keywords, each with a default on the model's side, so that a
    sampler which does not use them goes on calling the function as it does now.
    """

    def __call__(self, tokens_BT: Tensor, *, key_mask_BT: Tensor | None) -> Tensor:
        """Score every token at every position.

        Args:
            tokens_BT: int64 token ids, holes hold the mask token.
            key_mask_BT: bool, True where a position may be attended to; None means everywhere.

        Returns:
            Unnormalised logits [B, T, V] in any floating dtype, on the device of ``tokens_BT``. Entry i scores position
            i, or position i + 1 for a checkpoint sampled with ``SamplerConfig.right_shift``.
        """
        ...
