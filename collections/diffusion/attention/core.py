"""Core attention for Megatron's layers, under any pattern of ``masks``.

Shape letters: Q query positions, K key positions, B samples, H query heads and G key/value heads of this rank, D head
size.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_dllm.collections.diffusion.attention.cached_keys import CachedKeys, cached_mask, folded_bias
from nemo_dllm.collections.diffusion.attention.context import copies, gather_keys, query_shard
from nemo_dllm.collections.diffusion.attention.flex import flex
from nemo_dllm.collections.diffusion.attention.masks import (
    BlockCausal,
    Pattern,
    bidirectional_mask,
    dense_mask,
    sees_all_real_tokens,
)
from nemo_dllm.collections.diffusion.attention.ranked import has_ranks, ranked, takes

# In order of preference on a GPU; torch falls through to the next kernel that takes the inputs.
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

Kernel = Callable[[Tensor, Tensor, Tensor, Pattern, float, float], Tensor]
"""(query [B, H, Q, D], key and value [B, G, K, D], pattern, scale, dropout) -> context [B, H, Q, D]."""


def sdpa(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, scale: float, dropout: float) -> Tensor:
    """Torch's fused kernels; every mask but that of :class:`Bidirectional` without documents is dense."""
    grouped = query.size(1) != key.size(1)
    if isinstance(pattern, CachedKeys) and pattern.ranks is not None:
        return _fold_heads(query, key, value, pattern, scale)
    mask = _mask(pattern, query, key)
    with sdpa_kernel(_KERNELS, set_priority=True):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )


def _fold_heads(query: Tensor, key: Tensor, value: Tensor, pattern: CachedKeys, scale: float) -> Tensor:
    """Attention of the few queries of a generation, those of all heads of a group being queries of one head.

    The kernels that take a mask know no groups, and would copy the cache for each head.
    """
    rows, groups = key.shape[:2]
    bias = folded_bias(pattern, query.size(1) // groups, query.dtype)
    folded = query.reshape(rows, groups, -1, query.size(-1))
    # The kernel that takes masks in fp32 rounds to TF32.
    kernels = [SDPBackend.MATH] if query.dtype == torch.float32 else _KERNELS
    with sdpa_kernel(kernels, set_priority=True):
        context = F.scaled_dot_product_attention(folded, key, value, attn_mask=bias, scale=scale)
    return context.reshape(*query.shape[:3], -1)


def eager(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, scale: float, dropout: float) -> Tensor:
    """Attention spelled out, softmax in fp32: the reference that the fused kernels are tested against."""
    repeats = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1)).float() * scale
    mask = _mask(pattern, query, key)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    probabilities = F.dropout(scores.softmax(-1), dropout)
    return torch.matmul(probabilities.to(value.dtype), value)


def _mask(pattern: Pattern | CachedKeys, query: Tensor, key: Tensor) -> Tensor | None:
    """Bool, broadcasts to [B, H, Q, K]; None, and no tensor at all, where every token sees every token."""
    if isinstance(pattern, CachedKeys):
        visible_BLK = cached_mask(pattern)
        return None if visible_BLK is None else visible_BLK[:, None]
    if sees_all_real_tokens(pattern):
        return None if pattern.key_mask_BL is None else bidirectional_mask(pattern.key_mask_BL)
    return dense_mask(pattern, query.size(2), key.size(2), query.device)


class PatternAttention(nn.Module):
    """Attention under a pattern of ``masks``. Takes the place of Megatron's ``DotProductAttention``.

    Args:
        bidirectional: kernel where every token sees every real token (:func:`~masks.sees_all_real_tokens`).
        patterned: kernel of every other pattern. Generation (a cache, or blocks in evaluation mode) takes
            :func:`~ranked.ranked` in place of :func:`sdpa` and :func:`flex` where it can, and never :func:`flex`,
            which would compile nearly every call, as each has another length.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        bidirectional: Kernel = sdpa,
        patterned: Kernel = sdpa,
    ):
        super().__init__()
        # Megatron's apply_query_key_layer_scaling only moves a factor past an fp16 product; this softmax is fp32.
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.sequence_parallel = config.sequence_parallel
        self.context_group = pg_collection.cp if config.context_parallel_size > 1 else None
        self.bidirectional, self.patterned = bidirectional, patterned

    def forward(
        self, query_QBHD: Tensor, key_KBGD: Tensor, value_KBGD: Tensor, pattern: Pattern | CachedKeys
    ) -> Tensor:
        """Returns the context, [Q, B, H * D]. The queries may be the first Q of the K positions only.

        Under context parallelism, positions are those of this rank's shard, and ``pattern`` that of all.
        """
        kernel = self.bidirectional if sees_all_real_tokens(pattern) else self.patterned
        generates = isinstance(pattern, CachedKeys) or (isinstance(pattern, BlockCausal) and not self.training)
        if self.context_group is not None:
            tokens = len(key_KBGD) // copies(pattern)
            key_KBGD, value_KBGD = gather_keys(key_KBGD, value_KBGD, pattern, self.context_group)
            # A key mask is the same for all queries.
            if not sees_all_real_tokens(pattern):
                pattern = query_shard(pattern, self.context_group.rank(), tokens)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_QBHD, key_KBGD, value_KBGD))
        if generates and kernel in (flex, sdpa):
            kernel = ranked if has_ranks(pattern) and takes(query, pattern) else sdpa
        dropout = self.dropout if self.training else 0.0
        if dropout and not self.sequence_parallel:
            with get_cuda_rng_tracker().fork():
                context_BHQD = kernel(query, key, value, pattern, self.scale, dropout)
        else:
            context_BHQD = kernel(query, key, value, pattern, self.scale, dropout)
        return context_BHQD.permute(2, 0, 1, 3).flatten(2)
