"""Attention in which integers say who sees whom, forward only: a query sees a key whose rank is at most its own.

Scores stay on the chip (FlashAttention, Dao et al., 2022); keys that no query of a tile sees are not read; the query
heads of one key/value head share its tiles, so that each is read once; few queries of many keys are split over the keys
(Flash-Decoding, Dao et al., 2023). Tiles of keys begin at multiples of a constant, and hidden keys change no bit: what
a query gets depends on the keys that it sees and on their places, neither on other rows nor on what follows them.

Shape letters: Q query positions, K key positions, B samples, H = G * R query heads, G key/value heads, D head size,
T tiles of keys, P parts of the keys.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

HIDDEN = 2**31 - 1
"""Rank of a key that no query sees."""


class Tiling(NamedTuple):
    """How the work is cut."""

    rows: int
    """Queries of all heads of a group in one program; at least 16."""
    keys: int
    """Keys of one step."""
    warps: int
    stages: int
    part: int
    """Keys of one program, a multiple of ``keys``."""


KEYS = 64
_ALL_KEYS = 2**30
_FEW_ROWS = 256
_PART = 1024
"""Keys of one program, where a group has few queries: up to ``_FEW_ROWS``."""


class Ranks(NamedTuple):
    """Who sees whom, as the kernel reads it; see :func:`tile_ranks`."""

    query_BQ: Tensor
    key_BK: Tensor
    """As many as fill the last tile."""
    lowest_BT: Tensor
    highest_BT: Tensor


def tile_ranks(query_BQ: Tensor, key_BK: Tensor, keys: int = KEYS) -> Ranks:
    """Ranks, and of each tile of ``keys`` keys the lowest and the highest.

    Args:
        query_BQ: int32 [B or 1, Q], below ``HIDDEN``.
        key_BK: int32 [B or 1, K].
    """
    padded_BK = key_BK.new_full((len(key_BK), triton.cdiv(key_BK.size(1), keys) * keys), HIDDEN)
    padded_BK[:, : key_BK.size(1)] = key_BK
    lowest_BT, highest_BT = padded_BK.unflatten(1, (-1, keys)).aminmax(dim=-1)
    return Ranks(query_BQ, padded_BK, lowest_BT, highest_BT)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, ranks: Ranks | None, scale: float) -> Tensor:
    """Softmax in fp32 over the keys whose rank is at most the query's; 0 for a query that sees none.

    Args:
        query: bf16 or fp16 [B, H, Q, D], D <= 256. Its stride along D is 1, as of keys and values; others are free.
        key, value: [B, G, K, D].
        ranks: None where every query sees every key.
        scale: of the scores, above 0.

    Returns:
        The context, a view [B, H, Q, D] of contiguous [Q, B, H, D].
    """
    rows = query.size(2) * (query.size(1) // key.size(1))
    return attend(query, key, value, ranks, scale, _tiling(rows, query.size(3)))


def _tiling(rows: int, size: int) -> Tiling:
    """For ``rows`` queries of a group. Of shapes, so that passes can be recorded; not of how many samples there are."""
    return Tiling(
        rows=min(max(triton.next_power_of_2(rows), 16), 64),
        keys=KEYS,
        warps=4 if size <= 128 else 8,
        stages=3 if size <= 128 else 2,
        part=_PART if rows <= _FEW_ROWS else _ALL_KEYS,
    )


def attend(query: Tensor, key: Tensor, value: Tensor, ranks: Ranks | None, scale: float, tiling: Tiling) -> Tensor:
    """:func:`flash_attention` with a given tiling, whose ``keys`` are those of the ranks."""
    samples, heads, num_queries, size = query.shape
    groups, num_keys = key.shape[1:3]
    repeats = heads // groups
    parts = triton.cdiv(num_keys, tiling.part)
    rows = num_queries * repeats
    context = query.new_empty(num_queries, samples, heads, size)
    # Of each part of the keys its context before division, the maximum of its scores, the sum of their exponentials.
    partial, statistics = context, context
    if parts > 1:
        partial = query.new_empty(samples * groups, rows, parts, size, dtype=torch.float32)
        statistics = query.new_empty(samples * groups, rows, parts, 2, dtype=torch.float32)
    _forward_kernel[(samples * groups, triton.cdiv(rows, tiling.rows), parts)](
        query, key, value, context, partial, statistics, *_rank_arguments(ranks, samples, query),
        scale * 1.4426950408889634, num_queries, num_keys, samples,
        *(stride for x in (query, key, value) for stride in x.stride()[:3]),
        groups, repeats, size, max(triton.next_power_of_2(size), 16), tiling.rows, tiling.keys,
        tiling.part // tiling.keys, ranks is not None, parts > 1,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if parts > 1:
        _combine_kernel[(samples * groups * rows,)](
            partial, statistics, context, parts, samples, groups, repeats, rows, size, triton.next_power_of_2(size), 8,
            num_warps=2,
        )  # fmt: skip
    return context.permute(1, 2, 0, 3)


def _rank_arguments(ranks: Ranks | None, samples: int, unused: Tensor) -> tuple:
    """Four tensors, and their strides along samples; along positions only those of the queries may be 0."""
    if ranks is None:
        return (unused,) * 4 + (0,) * 4
    expanded = [x.expand(samples, -1) for x in ranks]
    return *ranks, ranks.query_BQ.stride(1), *(x.stride(0) for x in (expanded[0], *expanded[1:3]))


@triton.jit
def _visible_tiles(lowest, highest, first, last, lowest_query, highest_query, SCAN: tl.constexpr):
    """Of the tiles from first to last, where the visible ones begin, then a run that all queries see; their ends."""
    begin = last
    end = first
    full_begin = last
    full_end = last
    for at in range(first, last, SCAN):
        tile = at + tl.arange(0, SCAN)
        inside = tile < last
        low = tl.load(lowest + tile, mask=inside, other=2147483647)
        high = tl.load(highest + tile, mask=inside, other=2147483647)
        seen = low <= highest_query
        full = high <= lowest_query
        begin = tl.minimum(begin, tl.min(tl.where(seen, tile, last), 0))
        end = tl.maximum(end, tl.max(tl.where(seen, tile + 1, first), 0))
        full_begin = tl.minimum(full_begin, tl.min(tl.where(full, tile, last), 0))
        full_end = tl.minimum(full_end, tl.min(tl.where(inside & (tile > full_begin) & ~full, tile, last), 0))
    return begin, tl.minimum(full_begin, end), tl.minimum(full_end, end), end


@triton.jit
def _attend_tiles(
    context, maximum, total, query, key, value, key_stride, value_stride, query_rank, key_rank, scale, num_keys,
    begin, end, D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr, RANKED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go on with the softmax over the tiles from begin to end."""
    lane = tl.arange(0, KEYS)
    d = tl.arange(0, BLOCK_D)
    for tile in range(begin, end):
        first = tl.cast(tile, tl.int64) * KEYS
        inside = (first + lane < num_keys)[:, None]
        to_key = key + first * key_stride + (lane[:, None] * key_stride + d[None, :])
        to_value = value + first * value_stride + (lane[:, None] * value_stride + d[None, :])
        if D < BLOCK_D:
            loaded = (d < D)[None, :] & inside
            k = tl.load(to_key, mask=loaded, other=0.0)
            v = tl.load(to_value, mask=loaded, other=0.0)
        elif MASKED:
            k = tl.load(to_key, mask=inside, other=0.0)
            v = tl.load(to_value, mask=inside, other=0.0)
        else:
            k = tl.load(to_key)
            v = tl.load(to_value)
        scores = tl.dot(query, k.T)
        if MASKED:
            if RANKED:
                allowed = tl.load(key_rank + first + lane)[None, :] <= query_rank[:, None]
            else:
                allowed = (first + lane < num_keys)[None, :]
            scores = tl.where(allowed, scores, -float("inf"))
        larger = tl.maximum(maximum, tl.max(scores, 1) * scale)
        # Of a query that has seen no key yet it is not.
        finite = tl.where(larger == -float("inf"), 0.0, larger) if MASKED else larger
        weights = tl.exp2(scores * scale - finite[:, None])
        shrink = tl.exp2(maximum - finite)
        total = total * shrink + tl.sum(weights, 1)
        context = tl.dot(weights.to(v.dtype), v, context * shrink[:, None])
        maximum = larger
    return context, maximum, total


@triton.jit(do_not_specialize=["num_queries", "num_keys", "samples", "rank_step", "s_qr", "s_tiles"])
def _forward_kernel(
    query, key, value, context, partial, statistics, query_rank, key_rank, lowest, highest,
    rank_step, s_qr, s_kr, s_tiles, scale, num_queries, num_keys, samples,
    s_qb, s_qh, s_qq, s_kb, s_kg, s_kk, s_vb, s_vg, s_vk,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, RANKED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    sample = (tl.program_id(0) // G).to(tl.int64)
    group = (tl.program_id(0) % G).to(tl.int64)
    # Later queries often see more keys, and what takes longest begins first.
    row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
    position = (row // R).to(tl.int64)
    head = group * R + row % R
    exists = position < num_queries
    d = tl.arange(0, BLOCK_D)
    stored = exists[:, None] & (d < D)[None, :]
    at = sample * s_qb + position * s_qq + head * s_qh
    q = tl.load(query + at[:, None] + d[None, :], mask=stored, other=0.0)
    first = tl.program_id(2) * PART
    last = tl.minimum(first + PART, tl.cdiv(num_keys, KEYS))
    rank = tl.zeros((ROWS,), tl.int32)
    if RANKED:
        rank = tl.load(query_rank + sample * s_qr + position * rank_step, mask=exists, other=-2147483648)
        begin, full_begin, full_end, end = _visible_tiles(
            lowest + sample * s_tiles, highest + sample * s_tiles, first, last,
            tl.min(tl.where(exists, rank, 2147483647), 0), tl.max(rank, 0), 64,
        )  # fmt: skip
        key_rank += sample * s_kr
    else:
        begin, full_begin, full_end, end = first, first, tl.minimum(last, num_keys // KEYS), last
    key += sample * s_kb + group * s_kg
    value += sample * s_vb + group * s_vg
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    maximum = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    # In the order of the keys, whichever tiles need a mask.
    acc, maximum, total = _attend_tiles(
        acc, maximum, total, q, key, value, s_kk, s_vk, rank, key_rank, scale, num_keys,
        begin, full_begin, D, BLOCK_D, KEYS, RANKED, True,
    )  # fmt: skip
    acc, maximum, total = _attend_tiles(
        acc, maximum, total, q, key, value, s_kk, s_vk, rank, key_rank, scale, num_keys,
        full_begin, full_end, D, BLOCK_D, KEYS, RANKED, False,
    )  # fmt: skip
    acc, maximum, total = _attend_tiles(
        acc, maximum, total, q, key, value, s_kk, s_vk, rank, key_rank, scale, num_keys,
        full_end, end, D, BLOCK_D, KEYS, RANKED, True,
    )  # fmt: skip
    if PARTIAL:
        to = (tl.program_id(0).to(tl.int64) * num_queries * R + row) * tl.num_programs(2) + tl.program_id(2)
        tl.store(partial + to[:, None] * D + d[None, :], acc, mask=stored)
        tl.store(statistics + to * 2, maximum, mask=exists)
        tl.store(statistics + to * 2 + 1, total, mask=exists)
    else:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        to = ((position * samples + sample) * (G * R) + head) * D
        tl.store(context + to[:, None] + d[None, :], result.to(context.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["parts", "samples", "rows"])
def _combine_kernel(
    partial, statistics, context, parts, samples,
    G: tl.constexpr, R: tl.constexpr, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    maximum = -float("inf")
    total = 0.0
    # So many at a time, however many there are: parts of hidden keys change no bit.
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = part < parts
        to = at * parts + part
        part_maximum = tl.load(statistics + to * 2, mask=inside, other=-float("inf"))
        part_total = tl.load(statistics + to * 2 + 1, mask=inside, other=0.0)
        mask = inside[:, None] & (d < D)[None, :]
        part_context = tl.load(partial + to[:, None] * D + d[None, :], mask=mask, other=0.0)
        larger = tl.maximum(maximum, tl.max(part_maximum, 0))
        finite = tl.where(larger == -float("inf"), 0.0, larger)
        weights = tl.exp2(part_maximum - finite)
        shrink = tl.exp2(maximum - finite)
        total = total * shrink + tl.sum(part_total * weights, 0)
        acc = acc * shrink + tl.sum(part_context * weights[:, None], 0)
        maximum = larger
    result = acc / tl.where(total == 0.0, 1.0, total)
    row = at % rows
    sample = at // rows // G
    head = at // rows % G * R + row % R
    to = ((row // R * samples + sample) * (G * R) + head) * D
    tl.store(context + to + d, result.to(context.dtype.element_ty), mask=d < D)
