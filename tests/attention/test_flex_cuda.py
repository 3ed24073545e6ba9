"""Compiled FlexAttention on a GPU against a dense mask, forward and backward, and its memory.

Shape letters: B samples, L tokens of a sample, H query heads, G key/value heads, Q queries, K keys, D head size.
"""

import pytest
import torch
import torch.nn.functional as F

from nemo_dllm.collections.diffusion.attention import flex
from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal, NoisyClean, dense_mask

pytestmark = pytest.mark.gpu

B, L = 3, 333  # three tiles of 128, and a part; off the grid of blocks of 32 too
# Largest difference over the largest exact value, and root mean square difference over that of the exact values.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 1.5e-2)}
NAMES = [
    "noisy and clean",
    "noisy and clean, padded",
    "noisy and clean, packed",
    "noisy and clean, causal",
    "block-causal",
    "block-causal, packed and padded",
    "bidirectional, packed",
]


def pattern_of(name):
    """The pattern, the length of its input, and which keys are real: bool [B, K]."""
    kind, _, fields = name.partition(", ")
    index_L = torch.arange(L, device="cuda")
    given, real_BL = {}, torch.ones(B, L, dtype=torch.bool, device="cuda")
    if "padded" in fields:
        real_BL = index_L < torch.tensor([[L], [200], [1]], device="cuda")
        given["key_mask_BL"] = real_BL
    if "packed" in fields:
        ends_BD = torch.tensor([[128, 150, 300], [1, 2, 3], [333, 333, 333]], device="cuda")
        given["document_BL"] = (index_L >= ends_BD[:, :, None]).sum(1)
    if kind == "noisy and clean":
        given["clean_causal"] = "causal" in fields
        return NoisyClean(32, L, **given), 2 * L, real_BL.repeat(1, 2)
    if kind == "bidirectional":
        return Bidirectional(**given), L, real_BL
    return BlockCausal(32, **given), L, real_BL


def inputs(queries, keys, heads=4, groups=2, head_size=64):
    generator = torch.Generator("cuda").manual_seed(0)

    # Megatron's layout [positions, B, heads, D], seen as [B, heads, positions, D].
    def random(positions, count):
        x = torch.randn(positions, B, count, head_size, device="cuda", generator=generator)
        return x.permute(1, 2, 0, 3)

    return random(queries, heads), random(keys, groups), random(keys, groups), random(queries, heads)


def context_and_gradients(attend, tensors, dtype):
    query, key, value, upstream = (x.to(dtype) for x in tensors)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    context = attend(*leaves)
    assert context.dtype == dtype
    return [context.detach(), *torch.autograd.grad(context, leaves, upstream)]


def dense(pattern):
    """Exact, in fp64, from the whole mask."""

    def attend(query, key, value):
        mask = dense_mask(pattern, query.size(2), key.size(2), query.device)
        repeats = query.size(1) // key.size(1)
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2)

    return attend


def flexibly(pattern):
    return lambda query, key, value: flex.flex(query, key, value, pattern, 0.2, 0.0)


def differences(actual, expected):
    """Largest and root mean square difference of each tensor, relative to the expected one's."""
    found = []
    for a, b in zip(actual, expected, strict=True):
        error = a.double() - b
        found.append(((error.abs().max() / b.abs().max()).item(), (error.norm() / b.norm()).item()))
    return found


def assert_close(actual, expected, dtype):
    assert all(x.isfinite().all() for x in actual)
    worst, typical = TOLERANCES[dtype]
    found = differences(actual, expected)
    assert all(largest <= worst and mean <= typical for largest, mean in found), found


@pytest.fixture(autouse=True)
def exact_products_and_no_compiled_code():
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_it_equals_the_dense_mask_forward_and_backward(name, dtype):
    pattern, keys, real_BK = pattern_of(name)
    # The last layer of [x_t | x_0] has the noised half for queries; to compile every case takes time.
    for queries in [keys, L] if name == "noisy and clean, packed" else [keys]:
        *tensors, upstream = inputs(queries, keys)
        # Nothing reads what a pad computes, so no gradient comes back to it.
        upstream = upstream * real_BK[:, None, :queries, None]
        tensors = [x.to(dtype).double() for x in (*tensors, upstream)]
        actual = context_and_gradients(flexibly(pattern), tensors, dtype)
        expected = context_and_gradients(dense(pattern), tensors, torch.float64)
        assert_close(actual, expected, dtype)


def test_another_pattern_would_be_noticed():
    """The mutated twin: a neighbouring block size is ten times further off than bf16 may be."""
    tensors = [x.bfloat16().double() for x in inputs(2 * L, 2 * L)]
    actual = context_and_gradients(flexibly(NoisyClean(33, L)), tensors, torch.bfloat16)
    expected = context_and_gradients(dense(NoisyClean(32, L)), tensors, torch.float64)
    assert all(mean > 0.15 for _, mean in differences(actual, expected))


def test_new_padding_and_documents_are_new_data_not_new_code():
    from torch._dynamo.utils import counters

    tensors = [x.bfloat16().double() for x in inputs(2 * L, 2 * L)]
    for name in ("noisy and clean, padded", "noisy and clean, packed"):
        graphs = []
        for shift in (0, 7, 100):
            given, _, _ = pattern_of(name)
            fields = {field: getattr(given, field) for field in ("key_mask_BL", "document_BL")}
            rolled = {field: value.roll(shift, 1) for field, value in fields.items() if value is not None}
            pattern = NoisyClean(32, L, **rolled)
            actual = context_and_gradients(flexibly(pattern), tensors, torch.bfloat16)
            expected = context_and_gradients(dense(pattern), tensors, torch.float64)
            assert_close(actual, expected, torch.bfloat16)
            graphs.append(counters["stats"]["unique_graphs"])
        assert graphs[0] == graphs[-1] > 0, name


def test_no_dense_mask_exists_at_2l_of_16384():
    """A dense bool mask alone is 256 MiB, and torch's kernels would make numbers of it."""
    length, positions = 8192, 16384
    generator = torch.Generator("cuda").manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, positions, 64, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        for heads in (2, 1, 1)
    )
    document_BL = (torch.arange(length, device="cuda") // 3000)[None]
    for given in ({}, {"document_BL": document_BL}):
        for _ in ("compiled", "measured"):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            pattern = NoisyClean(32, length, **given)
            # Without documents the mask of the first round is found again.
            flex.block_mask.__wrapped__(pattern, positions, positions, query.device)
            context = flex.flex(query, key, value, pattern, 0.125, 0.0)
            torch.autograd.grad(context.sum(), (query, key, value))
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            del context, pattern
        assert peak < 0.75 * positions * positions, f"{peak / 2**20:.0f} MiB"


def test_heads_of_128_and_long_rows_as_in_training():
    """Shapes of a 1.7B model: 16 heads, 8 of keys, [x_t | x_0] of 2 x 1024."""
    tensors = [x.bfloat16().double() for x in inputs(2048, 2048, heads=16, groups=8, head_size=128)]
    pattern = NoisyClean(32, 1024)
    actual = context_and_gradients(flexibly(pattern), tensors, torch.bfloat16)
    assert_close(actual, context_and_gradients(dense(pattern), tensors, torch.float64), torch.bfloat16)
