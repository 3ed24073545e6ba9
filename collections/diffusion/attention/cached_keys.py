"""Attention of a few tokens to all the keys that a cache holds, torch only.

Shape letters: B samples, L given tokens, K keys of the cache, G key/value heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.masks import built_field, built_once


@dataclass(frozen=True, eq=False)
class CachedKeys:
    """Who attends to whom where the keys of other tokens are at hand: generation block by block.

    It travels through the layers in the place of a pattern of ``masks``.

    Args:
        ranks: int32 [B, L or 1] of the tokens and [B, K] of the keys: a token sees a key whose rank is at most its own,
            and at least one key, unless nobody reads what it gets. None where every token sees every key.
        exchange: (layer number, keys [B, L, G, D] of the given tokens, their values) -> keys and values [B, K, G, D] to
            attend to. Each layer calls it once.
    """

    ranks: tuple[Tensor, Tensor] | None
    exchange: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
    built: dict = built_field()


@built_once
def cached_mask(keys: CachedKeys) -> Tensor | None:
    """Bool [B, L or 1, K], True = may attend, at least one True in each row; None where every token sees every key."""
    if keys.ranks is None:
        return None
    ranks_BL, key_ranks_BK = keys.ranks
    visible_BLK = key_ranks_BK[:, None] <= ranks_BL[:, :, None]
    # Softmax over nothing is NaN.
    return visible_BLK | ~visible_BLK.any(dim=-1, keepdim=True)


@built_once
def folded_bias(keys: CachedKeys, heads: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores of the queries of ``heads`` heads, one head's after the other's: 0 or -inf.

    Returns:
        [B, 1, heads * L or 1, K], for keys that not every token sees. As a mask of bools each layer would make it anew.
    """
    visible_BLK = cached_mask(keys)
    if visible_BLK.size(1) > 1:
        visible_BLK = visible_BLK.repeat(1, heads, 1)
    hidden_BLK = ~visible_BLK
    return torch.zeros_like(hidden_BLK, dtype=dtype).masked_fill_(hidden_BLK, -torch.inf)[:, None]
