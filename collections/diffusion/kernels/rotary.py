"""Split, normalise and rotate Megatron's fused query-key-value projection, forward and backward, in one pass each.

Shape letters: N = S * B tokens, G key/value heads, R query heads per key/value head, D head size, T rotary dimensions.
The projection is [N, G, R + 2, D]: of each key/value head its R queries, the key, the value.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS, _NORMALISED_HEADS, _BACKWARD_HEADS = 32, 8, 16
"""Heads in flight in one program, forward as they are and normalised, and backward."""
_PROGRAMS_PER_PROCESSOR = 8


class _Shape(NamedTuple):
    tokens: int
    batch: int
    groups: int
    slots: int
    """R + 2."""
    head: int
    rotary: int
    table_batch: int
    """1 where all samples share the table's rows, else B."""


def split_norm_rotate(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, table: Tensor | None, num_groups: int, head: int, eps
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``attention.self_attention.split_norm_rotate``; without gradients, the values are a view of ``qkv``."""
    if torch.is_grad_enabled():
        return _SplitNormRotate.apply(qkv, q_weight, k_weight, table, num_groups, head, eps)
    qkv = qkv.contiguous()
    shape = _shape(qkv, table, num_groups, head)
    value = qkv.view(*qkv.shape[:2], num_groups, shape.slots, head)[:, :, :, -1]
    return *_forward(qkv, None, (q_weight, k_weight), table, eps, shape), value


def _shape(qkv: Tensor, table: Tensor | None, num_groups: int, head: int) -> _Shape:
    sequence, batch, width = qkv.shape
    return _Shape(
        tokens=sequence * batch,
        batch=batch,
        groups=num_groups,
        slots=width // (num_groups * head),
        head=head,
        rotary=head if table is None else table.size(-1),
        table_batch=1 if table is None else table.size(2),
    )


def _forward(qkv: Tensor, value: Tensor | None, weights: tuple, table: Tensor | None, eps: float, shape: _Shape):
    """Queries and keys; writes the values where they are to be."""
    query = qkv.new_empty(*qkv.shape[:2], shape.groups * (shape.slots - 2), shape.head)
    key = qkv.new_empty(*qkv.shape[:2], shape.groups, shape.head)
    heads = _HEADS if weights[0] is None else _NORMALISED_HEADS
    grid = shape.tokens, triton.cdiv(shape.groups * shape.slots, heads)
    constants = _constants(shape, weights[0], table, heads)
    _forward_kernel[grid](qkv, query, key, value, *weights, table, eps, *constants, num_warps=4)
    return query, key


class _SplitNormRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, table, num_groups, head, eps):
        qkv = qkv.contiguous()
        shape = _shape(qkv, table, num_groups, head)
        value = qkv.new_empty(*qkv.shape[:2], num_groups, head)
        query, key = _forward(qkv, value, (q_weight, k_weight), table, eps, shape)
        ctx.save_for_backward(qkv, q_weight, k_weight, table)
        ctx.shape, ctx.eps = shape, eps
        return query, key, value

    @staticmethod
    def backward(ctx, grad_query, grad_key, grad_value):
        qkv, q_weight, k_weight, table = ctx.saved_tensors
        shape = ctx.shape
        grad_qkv = torch.empty_like(qkv)
        programs = min(shape.tokens, _num_processors(qkv.device) * _PROGRAMS_PER_PROCESSOR)
        # Of each program, the gradients of both weights.
        partial = qkv.new_zeros(programs, 2, shape.head, dtype=torch.float32)
        _backward_kernel[(programs,)](
            qkv,
            grad_query.contiguous(),
            grad_key.contiguous(),
            grad_value.contiguous(),
            grad_qkv,
            partial,
            q_weight,
            k_weight,
            table,
            ctx.eps,
            shape.tokens,
            *_constants(shape, q_weight, table, _BACKWARD_HEADS),
            num_warps=4,
        )
        weight_grads = (None, None)
        if q_weight is not None:
            weight_grads = partial.sum(0).to(q_weight.dtype).unbind(0)
        return grad_qkv, *weight_grads, None, None, None, None


def _constants(shape: _Shape, q_weight: Tensor | None, table: Tensor | None, heads: int) -> tuple:
    half = shape.rotary // 2
    return (
        shape.tokens // shape.batch * shape.table_batch * shape.rotary,  # from cosines to sines
        shape.batch,
        shape.groups,
        shape.slots,
        shape.head,
        half,
        shape.table_batch,
        q_weight is not None,
        table is not None,
        heads,
        triton.next_power_of_2(half),
        triton.next_power_of_2(max(shape.head - 2 * half, 1)),
    )


def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def _rotary_row(table, token, sine_offset, B: tl.constexpr, HALF: tl.constexpr, TABLE_B: tl.constexpr, d):
    """Cosines and sines of both halves for one token, [1, block]."""
    row = token // B * TABLE_B + (token % B if TABLE_B > 1 else 0)
    at = table + row * 2 * HALF + d
    inside = d < HALF
    cos1 = tl.load(at, mask=inside, other=0.0)
    cos2 = tl.load(at + HALF, mask=inside, other=0.0)
    sin1 = tl.load(at + sine_offset, mask=inside, other=0.0)
    sin2 = tl.load(at + sine_offset + HALF, mask=inside, other=0.0)
    return cos1[None, :], cos2[None, :], sin1[None, :], sin2[None, :]


@triton.jit
def _forward_kernel(
    qkv, query, key, value, q_weight, k_weight, table, eps, sine_offset,
    B: tl.constexpr, G: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TABLE_B: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_BLOCK)
    rest = tl.arange(0, REST_BLOCK)
    R: tl.constexpr = SLOTS - 2
    REST: tl.constexpr = D - 2 * HALF
    if ROTARY:
        cos1, cos2, sin1, sin2 = _rotary_row(table, token, sine_offset, B, HALF, TABLE_B, d)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    group = head // SLOTS
    slot = head % SLOTS
    # Values that are not written are not read.
    exists = head < G * SLOTS
    if value is None:
        exists = exists & (slot <= R)
    is_query = (slot < R) & exists
    is_key = (slot == R) & exists
    is_value = (slot == R + 1) & exists
    half_mask = exists[:, None] & (d < HALF)[None, :]
    rest_mask = exists[:, None] & (rest < REST)[None, :]
    source = qkv + token * (G * SLOTS * D) + head[:, None] * D
    x1 = tl.load(source + d[None, :], mask=half_mask, other=0.0).to(tl.float32)
    x2 = tl.load(source + HALF + d[None, :], mask=half_mask, other=0.0).to(tl.float32)
    x3 = tl.load(source + 2 * HALF + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    y1, y2, y3 = x1, x2, x3
    if NORM:
        squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1) + tl.sum(x3 * x3, 1)
        scale = tl.rsqrt(squares / D + eps)[:, None]
        w1 = _weights(q_weight, k_weight, d, HALF, is_query)
        w2 = _weights(q_weight + HALF, k_weight + HALF, d, HALF, is_query)
        w3 = _weights(q_weight + 2 * HALF, k_weight + 2 * HALF, rest, REST, is_query)
        y1 = y1 * scale * w1
        y2 = y2 * scale * w2
        y3 = y3 * scale * w3
    if ROTARY:
        turned1 = y1 * cos1 - y2 * sin1
        y2 = y2 * cos2 + y1 * sin2
        y1 = turned1
    plain = is_value[:, None]
    y1 = tl.where(plain, x1, y1)
    y2 = tl.where(plain, x2, y2)
    y3 = tl.where(plain, x3, y3)
    to_query = query + token * (G * R * D) + (group * R + slot)[:, None] * D
    to_key = key + token * (G * D) + group[:, None] * D
    dtype = query.dtype.element_ty
    tl.store(to_query + d[None, :], y1.to(dtype), mask=half_mask & is_query[:, None])
    tl.store(to_query + HALF + d[None, :], y2.to(dtype), mask=half_mask & is_query[:, None])
    tl.store(to_query + 2 * HALF + rest[None, :], y3.to(dtype), mask=rest_mask & is_query[:, None])
    tl.store(to_key + d[None, :], y1.to(dtype), mask=half_mask & is_key[:, None])
    tl.store(to_key + HALF + d[None, :], y2.to(dtype), mask=half_mask & is_key[:, None])
    tl.store(to_key + 2 * HALF + rest[None, :], y3.to(dtype), mask=rest_mask & is_key[:, None])
    if value is not None:
        to_value = value + token * (G * D) + group[:, None] * D
        tl.store(to_value + d[None, :], y1.to(dtype), mask=half_mask & is_value[:, None])
        tl.store(to_value + HALF + d[None, :], y2.to(dtype), mask=half_mask & is_value[:, None])
        tl.store(to_value + 2 * HALF + rest[None, :], y3.to(dtype), mask=rest_mask & is_value[:, None])


@triton.jit
def _weights(q_weight, k_weight, d, LIMIT: tl.constexpr, is_query):
    """The norm weight of each head, [heads, block]."""
    q = tl.load(q_weight + d, mask=d < LIMIT, other=0.0).to(tl.float32)
    k = tl.load(k_weight + d, mask=d < LIMIT, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q[None, :], k[None, :])


@triton.jit
def _gradient(to_query, to_key, to_value, offset, mask, is_query, is_key, is_value):
    """The incoming gradient of each head, fp32 [heads, block]."""
    from_query = tl.load(to_query + offset, mask=mask & is_query[:, None], other=0.0).to(tl.float32)
    from_key = tl.load(to_key + offset, mask=mask & is_key[:, None], other=0.0).to(tl.float32)
    from_value = tl.load(to_value + offset, mask=mask & is_value[:, None], other=0.0).to(tl.float32)
    return from_query + from_key + from_value


@triton.jit
def _backward_kernel(
    qkv, grad_query, grad_key, grad_value, grad_qkv, partial, q_weight, k_weight, table, eps, tokens, sine_offset,
    B: tl.constexpr, G: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, TABLE_B: tl.constexpr,
    NORM: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    d = tl.arange(0, HALF_BLOCK)
    rest = tl.arange(0, REST_BLOCK)
    R: tl.constexpr = SLOTS - 2
    REST: tl.constexpr = D - 2 * HALF
    q1 = tl.zeros((HALF_BLOCK,), tl.float32)
    q2 = tl.zeros((HALF_BLOCK,), tl.float32)
    q3 = tl.zeros((REST_BLOCK,), tl.float32)
    k1 = tl.zeros((HALF_BLOCK,), tl.float32)
    k2 = tl.zeros((HALF_BLOCK,), tl.float32)
    k3 = tl.zeros((REST_BLOCK,), tl.float32)
    for token32 in range(program, tokens, tl.num_programs(0)):
        token = tl.cast(token32, tl.int64)
        if ROTARY:
            cos1, cos2, sin1, sin2 = _rotary_row(table, token, sine_offset, B, HALF, TABLE_B, d)
        for first in range(0, G * SLOTS, HEADS):
            head = first + tl.arange(0, HEADS)
            group = head // SLOTS
            slot = head % SLOTS
            exists = head < G * SLOTS
            is_query = (slot < R) & exists
            is_key = (slot == R) & exists
            is_value = (slot == R + 1) & exists
            half_mask = exists[:, None] & (d < HALF)[None, :]
            rest_mask = exists[:, None] & (rest < REST)[None, :]
            to_query = grad_query + token * (G * R * D) + (group * R + slot)[:, None] * D
            to_key = grad_key + token * (G * D) + group[:, None] * D
            to_value = grad_value + token * (G * D) + group[:, None] * D
            g1 = _gradient(to_query, to_key, to_value, d[None, :], half_mask, is_query, is_key, is_value)
            g2 = _gradient(to_query, to_key, to_value, HALF + d[None, :], half_mask, is_query, is_key, is_value)
            g3 = _gradient(to_query, to_key, to_value, 2 * HALF + rest[None, :], rest_mask, is_query, is_key, is_value)
            plain = is_value[:, None]
            y1, y2, y3 = g1, g2, g3
            if ROTARY:
                y1 = tl.where(plain, g1, g1 * cos1 + g2 * sin2)
                y2 = tl.where(plain, g2, g2 * cos2 - g1 * sin1)
            at = token * (G * SLOTS * D) + head[:, None] * D
            if NORM:
                x1 = tl.load(qkv + at + d[None, :], mask=half_mask, other=0.0).to(tl.float32)
                x2 = tl.load(qkv + at + HALF + d[None, :], mask=half_mask, other=0.0).to(tl.float32)
                x3 = tl.load(qkv + at + 2 * HALF + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
                squares = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1) + tl.sum(x3 * x3, 1)
                scale = tl.rsqrt(squares / D + eps)[:, None]
                x1 = x1 * scale
                x2 = x2 * scale
                x3 = x3 * scale
                q1 += tl.sum(tl.where(is_query[:, None], y1 * x1, 0.0), 0)
                q2 += tl.sum(tl.where(is_query[:, None], y2 * x2, 0.0), 0)
                q3 += tl.sum(tl.where(is_query[:, None], y3 * x3, 0.0), 0)
                k1 += tl.sum(tl.where(is_key[:, None], y1 * x1, 0.0), 0)
                k2 += tl.sum(tl.where(is_key[:, None], y2 * x2, 0.0), 0)
                k3 += tl.sum(tl.where(is_key[:, None], y3 * x3, 0.0), 0)
                n1 = y1 * _weights(q_weight, k_weight, d, HALF, is_query)
                n2 = y2 * _weights(q_weight + HALF, k_weight + HALF, d, HALF, is_query)
                n3 = y3 * _weights(q_weight + 2 * HALF, k_weight + 2 * HALF, rest, REST, is_query)
                mean = ((tl.sum(n1 * x1, 1) + tl.sum(n2 * x2, 1) + tl.sum(n3 * x3, 1)) / D)[:, None]
                y1 = tl.where(plain, g1, scale * (n1 - x1 * mean))
                y2 = tl.where(plain, g2, scale * (n2 - x2 * mean))
                y3 = tl.where(plain, g3, scale * (n3 - x3 * mean))
            dtype = grad_qkv.dtype.element_ty
            tl.store(grad_qkv + at + d[None, :], y1.to(dtype), mask=half_mask)
            tl.store(grad_qkv + at + HALF + d[None, :], y2.to(dtype), mask=half_mask)
            tl.store(grad_qkv + at + 2 * HALF + rest[None, :], y3.to(dtype), mask=rest_mask)
    if NORM:
        to = partial + program * 2 * D
        tl.store(to + d, q1, mask=d < HALF)
        tl.store(to + HALF + d, q2, mask=d < HALF)
        tl.store(to + 2 * HALF + rest, q3, mask=rest < REST)
        tl.store(to + D + d, k1, mask=d < HALF)
        tl.store(to + D + HALF + d, k2, mask=d < HALF)
        tl.store(to + D + 2 * HALF + rest, k3, mask=rest < REST)
