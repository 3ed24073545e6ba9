"""Attention in generation on a GPU, by ranks: a query sees a key whose rank is at most its own.

Torch's fused kernels take such patterns as dense masks only, which they read in full, and FlexAttention compiles for
every length.

Shape letters: B samples, Q query positions, K key positions, H query heads, G key/value heads, D head size.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.attention.cached_keys import CachedKeys
from nemo_dllm.collections.diffusion.attention.masks import BlockCausal, Pattern, built_once

if TYPE_CHECKING:
    from nemo_dllm.collections.diffusion.kernels.flash_attention import Ranks

LARGEST_HEAD = 256
FEW_QUERIES = 64
"""Up to so many, that see all keys, torch's kernels are slow: each head of a group reads the keys that it shares."""


def has_ranks(pattern: Pattern | CachedKeys) -> bool:
    """Whether ranks say who sees whom: of cached keys, and of the blocks of samples that are one document."""
    return isinstance(pattern, CachedKeys) or (isinstance(pattern, BlockCausal) and pattern.document_BL is None)


def takes(query: Tensor, pattern: Pattern | CachedKeys) -> bool:
    """Whether :func:`ranked` is there for queries of this kind, and faster than torch's kernels."""
    if isinstance(pattern, CachedKeys) and pattern.ranks is None and query.size(2) > FEW_QUERIES:
        return False
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.size(-1) <= LARGEST_HEAD and not torch.is_grad_enabled()


def ranked(
    query: Tensor, key: Tensor, value: Tensor, pattern: BlockCausal | CachedKeys, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention under a pattern that :func:`has_ranks`, in one kernel of this project; forward only.

    Padding sees real tokens of its own and earlier blocks, and is 0 where there are none; nobody reads it.

    Args:
        query: [B, H, Q, D], the first Q of the K positions unless the keys are those of a cache.
        key, value: [B, G, K, D], of any strides.
        pattern: who attends to whom.
        scale: of the scores, above 0.
        dropout: generation has none, whatever is trained with.

    Returns:
        The context, [B, H, Q, D].
    """
    from nemo_dllm.collections.diffusion.kernels.flash_attention import flash_attention

    ranks = None
    if not isinstance(pattern, CachedKeys) or pattern.ranks is not None:
        ranks = ranks_of(pattern, query.size(2), key.size(2), query.device)
    return flash_attention(query, key, value, ranks, scale)


@built_once
def ranks_of(pattern: BlockCausal | CachedKeys, num_queries: int, num_keys: int, device: torch.device) -> "Ranks":
    """The ranks of a pattern, those of cached keys or else blocks; a hidden key has the highest of all."""
    from nemo_dllm.collections.diffusion.kernels.flash_attention import HIDDEN, tile_ranks

    if isinstance(pattern, CachedKeys):
        query_BQ, key_BK = pattern.ranks
        return tile_ranks(query_BQ.expand(-1, num_queries), key_BK)
    position_BK = pattern.position_BL
    if position_BK is None:
        position_BK = torch.arange(num_keys, device=device)[None]
    key_BK = (position_BK // pattern.block_size).int()
    query_BQ = key_BK[:, :num_queries]
    if pattern.key_mask_BL is not None:
        key_BK = key_BK.masked_fill(~pattern.key_mask_BL, HIDDEN)
    return tile_ranks(query_BQ, key_BK)
