"""How the layers of a pass see a cache.

Shape letters: B rows, L positions of one pass, S cache slots, G key/value heads, D head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.cached_keys import CachedKeys
from nemo_dllm.collections.diffusion.sampling import CacheWindow, KVCache
from nemo_dllm.collections.diffusion.sampling.kv_cache import HIDDEN

See = Callable[[KVCache, CacheWindow], CachedKeys]
"""How the layers of a pass see a cache."""


def see_held(cache: KVCache, window: CacheWindow) -> CachedKeys:
    """The pass as layers see it: no slots behind the last visible one, and no ranks where all see all."""
    # Without the last slot, which padding has.
    ranks_BL, slot_ranks_BS = window.ranks_BL, window.slot_ranks_BS[:, :-1]
    number_S = torch.arange(1, slot_ranks_BS.size(1) + 1, device=slot_ranks_BS.device)
    used = ((slot_ranks_BS < HIDDEN).any(dim=0) * number_S).max().clamp_min(1)
    highest = slot_ranks_BS.where(number_S <= used, ranks_BL.min()).max()
    # One wait for the device, not two.
    used, sees_all = torch.stack([used, (highest <= ranks_BL.min()).long()]).tolist()
    ranks = None if sees_all else (ranks_BL, slot_ranks_BS[:, :used])
    return CachedKeys(ranks, _exchange(cache, window, used))


def see_all(cache: KVCache, window: CacheWindow) -> CachedKeys:
    """The pass over all slots, however many are held: a recorded pass serves them all, and waits for nothing."""
    slot_ranks_BS = window.slot_ranks_BS[:, :-1]
    return CachedKeys((window.ranks_BL, slot_ranks_BS), _exchange(cache, window, slot_ranks_BS.size(1)))


def _exchange(
    cache: KVCache, window: CacheWindow, slots: int
) -> Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The part of ``CachedKeys`` that writes to the cache, and reads its first slots."""

    def exchange(layer: int, keys_BLGD: Tensor, values_BLGD: Tensor) -> tuple[Tensor, Tensor]:
        keys_BSGD, values_BSGD = cache.write(layer, window, keys_BLGD, values_BLGD)
        return keys_BSGD[:, :slots], values_BSGD[:, :slots]

    return exchange
