"""Attention masks of diffusion language models, torch only.

Shape letters: B samples, L positions, Q query positions, K key positions.

Every boolean mask of this project says True = may attend. Megatron and Transformer Engine say True = hidden; the
core-attention modules translate at their own border and nowhere else.
"""

from torch import Tensor


def visible_keys(key_mask_BL: Tensor) -> Tensor:
    """Normalise a padding mask and make every row attendable.

    Args:
        key_mask_BL: bool [B, L], or an integer tensor of zeros and ones; True or 1 = real token.

    Returns:
        bool [B, L]. A row without a single real token sees all its positions: softmax over no key is NaN, and
        nothing of such a row is trained or read.

    Raises:
        ValueError: for floating point masks, whose meaning (0/1 or 0/-inf) cannot be told.
    """
    if key_mask_BL.is_floating_point():
        raise ValueError(
            f"key_mask has dtype {key_mask_BL.dtype}, where 0/1 and 0/-inf cannot be told apart; "
            "pass a bool mask, True = real token"
        )
    key_mask_BL = key_mask_BL.bool()
    return key_mask_BL | ~key_mask_BL.any(dim=-1, keepdim=True)


def bidirectional_mask(key_mask_BL: Tensor) -> Tensor:
    """Padding mask in the form of scaled dot product attention: bool [B, 1, 1, K], broadcast over heads and queries."""
    return key_mask_BL[:, None, None, :]
