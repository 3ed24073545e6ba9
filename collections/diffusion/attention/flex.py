"""Block-sparse attention under any pattern with torch's FlexAttention, torch only.

Shape letters: Q query positions, K key positions, B samples, H query heads, G key/value heads, D head size.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nemo_dllm.collections.diffusion.attention.masks import Pattern, built_once, num_samples, sees_all_tokens

TILE = 128
"""Queries and keys of one tile of the kernel: tiles without an allowed pair cost nothing, those with all no mask."""

_ENTRIES = 2**24
"""Entries of the mask that exist at a time while its tiles are counted."""


def flex(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, scale: float, dropout: float) -> Tensor:
    """Attention that computes only the tiles in which a pattern allows something; no dense mask exists.

    Compiled at the first call for each shape on a GPU; on a CPU it runs uncompiled, forward only.

    Args:
        query: [B, H, Q, D], the first Q of the K positions.
        key, value: [B, G, K, D].
        pattern: who attends to whom.
        scale: of the scores.
        dropout: probability that a score is dropped; only 0.

    Returns:
        The context, [B, H, Q, D].

    Raises:
        ValueError: for dropout.
    """
    check_no_dropout(dropout)
    grouped = query.size(1) != key.size(1)
    mask = None if sees_all_tokens(pattern) else block_mask(pattern, query.size(2), key.size(2), query.device)
    attend = _compiled() if query.is_cuda else flex_attention
    return attend(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)


def check_no_dropout(attention_dropout: float) -> None:
    """FlexAttention has no dropout.

    Raises:
        ValueError: for any.
    """
    if attention_dropout:
        raise ValueError(
            f"attention_dropout={attention_dropout} is not supported by FlexAttention; "
            "set attention_dropout=0 or attention_backend='sdpa'"
        )


@built_once
def block_mask(pattern: Pattern, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """A pattern as FlexAttention takes it: which tiles hold allowed pairs, some or only, and the predicate.

    The host never waits for the device.
    """
    some_BQK, all_BQK = _tiles(pattern, num_queries, num_keys, device)
    return BlockMask.from_kv_blocks(
        *_listed(some_BQK & ~all_BQK),
        *_listed(all_BQK),
        BLOCK_SIZE=TILE,
        mask_mod=_mask_mod(pattern),
        seq_lengths=(num_queries, num_keys),
    )


@cache
def _compiled() -> Callable:
    # Two query lengths (the last layer's, the others'), with and without padding, in training and in validation: more
    # than the compiler's default limit. Beyond the limit it would fall back to dense scores without a word.
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, 64)
    # Symbolic sizes make slower kernels.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _mask_mod(pattern: Pattern) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    # Of a copy: the pattern keeps the mask, and a cycle would hold device memory until the collector comes by.
    copy = replace(pattern)

    def mask_mod(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return copy.allows(sample, query, key)

    return mask_mod


def _tiles(pattern: Pattern, num_queries: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which tiles hold some allowed pair, and which hold nothing else: bool [B or 1, tiles of queries, tiles of keys].

    A tile that reaches beyond the end never holds allowed pairs only.
    """
    samples = num_samples(pattern)
    rows = max(_ENTRIES // (samples * num_keys) // TILE, 1) * TILE
    sample_B11 = torch.arange(samples, device=device)[:, None, None]
    key_11K = torch.arange(num_keys, device=device)[None, None]
    some, all_ = [], []
    for start in range(0, num_queries, rows):
        query_1Q1 = torch.arange(start, min(start + rows, num_queries), device=device)[None, :, None]
        allowed_BQK = pattern.allows(sample_B11, query_1Q1, key_11K).expand(samples, -1, -1)
        allowed_BQK = F.pad(allowed_BQK, (0, -num_keys % TILE, 0, -query_1Q1.numel() % TILE))
        tiles = allowed_BQK.unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))
        some.append(tiles.any(4).any(2))
        all_.append(tiles.all(4).all(2))
    return torch.cat(some, dim=1), torch.cat(all_, dim=1)


def _listed(tiles_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of tiles, how many are marked and which, those first: int32 [B, 1, Q] and [B, 1, Q, K]."""
    marked = tiles_BQK[:, None].int()
    order = marked.argsort(dim=-1, descending=True, stable=True)
    return marked.sum(-1, dtype=torch.int32), order.int()
