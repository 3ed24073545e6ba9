"""Attention of a few tokens to all the keys that a cache holds, torch only.

Shape letters: B samples, L given tokens, K keys of the cache, G key/value heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class CachedKeys:
    """Who attends to whom where the keys of other tokens are at hand: generation block by block.

    It travels through the layers in the place of a pattern of ``masks``.

    Args:
        visible_BLK: bool [B, L or 1, K], True = may attend, at least one True in each row; None where every token sees
            every key.
        exchange: (layer number, keys [B, L, G, D] of the given tokens, their values) -> keys and values [B, K, G, D] to
            attend to. Each layer calls it once.
    """

    visible_BLK: Tensor | None
    exchange: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
