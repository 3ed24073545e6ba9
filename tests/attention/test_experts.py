"""Experts in grouped products against Megatron's, one after another."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_dllm.collections.diffusion.attention.experts import GroupedExperts, can_group
from nemo_dllm.collections.diffusion.attention.layers import diffusion_block_spec

CONFIG = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "moe_ffn_hidden_size": 24,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_grouped_gemm": True,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}
# The second expert gets no token.
TOKENS_PER_EXPERT = torch.tensor([3, 0, 7, 1])


def config_of(**fields):
    return TransformerConfig(**{**CONFIG, **fields})


@pytest.fixture
def both(single_process):
    """Grouped experts, and Megatron's with the same weights: ``both(**fields of the config)``."""

    def build(**fields):
        config = config_of(**fields)
        spec = diffusion_block_spec(config, transformer_impl="local").layer_specs[0].submodules.mlp.submodules.experts
        plain = ModuleSpec(SequentialMLP, submodules=spec.submodules)
        grouped, sequential = (
            build_module(s, 4, config, pg_collection=get_default_pg_collection()) for s in (spec, plain)
        )
        sequential.load_state_dict(grouped.state_dict())
        return grouped, sequential

    return build


def result(experts, device="cpu", dtype=torch.float32, tokens_per_expert=TOKENS_PER_EXPERT):
    """Output, and gradients of inputs and weights."""
    experts = experts.to(device, dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = int(tokens_per_expert.sum())
    x, probs, grad = (torch.randn(*shape, generator=generator) for shape in ((tokens, 32), (tokens,), (tokens, 32)))
    x, probs = x.to(device, dtype).requires_grad_(), probs.sigmoid().to(device).requires_grad_()
    output, bias = experts(x, tokens_per_expert, probs)
    assert bias is None
    output.backward(grad.to(output))
    weights = {name: p.grad for name, p in experts.named_parameters()}
    return {"output": output.detach(), "x": x.grad, "probs": probs.grad, **weights}


def largest_difference(expected, actual):
    assert expected.keys() == actual.keys()
    return max(((actual[n] - expected[n]).abs().max() / expected["output"].abs().max()).item() for n in expected)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tokens", [[3, 0, 7, 1], [0, 0, 0, 5], [0, 0, 0, 0]], ids=str)
def test_grouped_experts_are_the_same(both, tokens, fused):
    grouped, sequential = both(bias_activation_fusion=fused)
    assert type(grouped) is GroupedExperts
    tokens = torch.tensor(tokens)
    expected, actual = (result(experts, tokens_per_expert=tokens) for experts in (sequential, grouped))
    assert len(expected) == 3 + 4 * 2
    if tokens.sum():
        assert largest_difference(expected, actual) < 1e-5
        # Experts without tokens have a gradient, of zeros: the optimizer and gradient buffers expect one.
        assert not actual["local_experts.0.linear_fc1.weight"].any() or tokens[0]


def test_double_precision_too(both):
    grouped, sequential = both()
    assert largest_difference(*(result(experts, dtype=torch.float64) for experts in (sequential, grouped))) < 1e-6


def test_checkpoints_are_the_same(both):
    grouped, sequential = both()
    ours, theirs = (experts.sharded_state_dict("mlp.") for experts in (grouped, sequential))
    assert {(v.key, v.global_shape) for v in ours.values() if hasattr(v, "global_shape")} == {
        (v.key, v.global_shape) for v in theirs.values() if hasattr(v, "global_shape")
    }
    assert grouped.state_dict().keys() == sequential.state_dict().keys()


def test_weights_are_not_kept_twice(both):
    """For the backward pass, stacked copies of all layers' experts would double the memory of weights."""
    grouped, _ = both()
    weights = {p.data_ptr() for p in grouped.parameters()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        grouped(torch.randn(11, 32, requires_grad=True), TOKENS_PER_EXPERT, torch.rand(11))
    assert weights <= {x.data_ptr() for x in kept}
    assert not [x for x in kept if x.dim() == 3]


@pytest.mark.parametrize(
    "fields",
    [{"moe_grouped_gemm": False}, {"moe_ffn_hidden_size": 20}, {"activation_func": torch.nn.functional.gelu}],
    ids=str,
)
def test_experts_that_do_not_group_run_one_after_another(fields):
    config = config_of(**fields)
    spec = diffusion_block_spec(config, transformer_impl="local").layer_specs[0]
    assert spec.submodules.mlp.submodules.experts.module is SequentialMLP
    assert can_group(config) == (not config.moe_grouped_gemm)


def test_the_choice_stays_for_further_stages():
    """A virtual pipeline stage builds layers of its own."""
    config = config_of()
    for _ in range(2):
        spec = diffusion_block_spec(config, transformer_impl="local").layer_specs[0]
        assert spec.submodules.mlp.submodules.experts.module is GroupedExperts
    assert get_gpt_decoder_block_spec(config_of(moe_grouped_gemm=False), False) is not None


BEFORE = 1e-3


def accumulated(experts, device, dtype):
    """As ``result``, the gradients of weights added in place to buffers that are not empty."""
    experts = experts.to(device, dtype)
    experts.fuse_wgrad_accumulation = True
    for weight in experts.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.full_like(weight, BEFORE, dtype=torch.float32), False
    found = result(experts, device, dtype)
    assert all(weight.grad_added_to_main_grad and weight.grad is not None for weight in experts.parameters())
    return found | {name: weight.main_grad - BEFORE for name, weight in experts.named_parameters()}


def test_gradients_are_added_to_buffers_in_place(both):
    grouped, sequential = both()
    assert largest_difference(result(sequential), accumulated(grouped, "cpu", torch.float32)) < 1e-5


def test_experts_of_which_some_are_frozen(both):
    grouped, sequential = both()
    for experts in (grouped, sequential):
        experts.local_experts[1].requires_grad_(False)
    grouped.fuse_wgrad_accumulation = True
    for weight in grouped.parameters():
        if weight.requires_grad:
            weight.main_grad = torch.zeros_like(weight)
    expected, actual = ({k: v for k, v in result(e).items() if v is not None} for e in (sequential, grouped))
    assert largest_difference(expected, actual) < 1e-5 and len(expected) == 3 + 3 * 2


def test_micro_batches_add_up_in_megatrons_buffers(both):
    """The third leaves this rank's experts without a token, as expert parallelism may."""
    totals = []
    for experts in both():
        experts.fuse_wgrad_accumulation = True
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        ddp = DistributedDataParallel(experts.config, config, experts)
        with ddp.no_sync():
            for tokens in ([3, 0, 7, 1], [0, 0, 0, 5], [0, 0, 0, 0], [2, 2, 2, 2]):
                result(ddp.module, tokens_per_expert=torch.tensor(tokens))
        totals.append({name: weight.main_grad.clone() for name, weight in experts.named_parameters()})
    sequential, grouped = totals[1], totals[0]
    assert all(sequential[name].any() for name in sequential)
    largest = max(gradient.abs().max() for gradient in sequential.values())
    assert all((grouped[name] - sequential[name]).abs().max() < 1e-5 * largest for name in sequential)


def test_buffers_of_another_precision_are_left_to_megatron(both):
    grouped, sequential = both()
    grouped.fuse_wgrad_accumulation = True
    for weight in grouped.parameters():
        weight.main_grad = torch.zeros_like(weight, dtype=torch.bfloat16)
    assert largest_difference(result(sequential), result(grouped)) < 1e-5
    assert not any(weight.main_grad.any() for weight in grouped.parameters())


@pytest.mark.gpu
def test_gradients_are_added_to_buffers_in_place_on_a_gpu(both):
    grouped, sequential = both()
    expected = {name: x.float() for name, x in result(sequential, "cuda", torch.bfloat16).items()}
    actual = {name: x.float() for name, x in accumulated(grouped, "cuda", torch.bfloat16).items()}
    assert largest_difference(expected, actual) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_grouped_experts_are_the_same_on_a_gpu(both, dtype, tolerance):
    grouped, sequential = both()
    results = (result(experts, "cuda", dtype) for experts in (sequential, grouped))
    expected, actual = ({name: x.float() for name, x in r.items()} for r in results)
    assert largest_difference(expected, actual) < tolerance
