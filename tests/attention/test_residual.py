"""Products that add themselves to the residual [S, B, H]: the same results, nobody's tensors lost."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_dllm.collections.diffusion.attention.layers import diffusion_block_spec
from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal, NoisyClean
from nemo_dllm.collections.diffusion.attention.residual import adding_in_place, keeps_no_tensor
from nemo_dllm.collections.diffusion.attention.self_attention import rotary_table

pytestmark = pytest.mark.usefixtures("single_process")

HIDDEN, LAYERS = 40, 3
DENSE = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method": lambda weight: nn.init.normal_(weight, std=0.2),
    "output_layer_init_method": lambda weight: nn.init.normal_(weight, std=0.2),
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
}
KINDS = {
    "dense": {},
    "biases": {"add_bias_linear": True},
    "experts": EXPERTS,
    "dense, then experts": {**EXPERTS, "moe_layer_freq": [0, 1, 1]},
}
PATTERNS = {"bidirectional": Bidirectional(), "blocks": BlockCausal(3), "[x_t | x_0]": NoisyClean(3, 6)}


def decoder_of(kind="dense", dtype=torch.float32, **fields):
    torch.manual_seed(0)
    config = TransformerConfig(**{**DENSE, **KINDS[kind], **fields})
    decoder = TransformerBlock(config, diffusion_block_spec(config, transformer_impl="local")).eval().to(dtype)
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return decoder


def states(positions=12, samples=2, dtype=torch.float32):
    return torch.randn(positions, samples, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


def run(decoder, states_SBH, pattern=PATTERNS["bidirectional"]):
    angles = torch.arange(len(states_SBH)).float()[:, None, None, None] * torch.linspace(0.1, 1, 16)
    return decoder(states_SBH, None, attention_bias=pattern, rotary_pos_emb=rotary_table(angles))


@torch.no_grad()
def run_in_place(decoder, *arguments):
    with adding_in_place(decoder):
        return run(decoder, *arguments)


class Additions(TorchDispatchMode):
    """Counts what adds tensors of the residual's width, products apart."""

    def __enter__(self):
        self.counts = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("add", "add_", "addmm", "addmm_") and result.size(-1) == HIDDEN:
            # A bias is not of the residual's shape; a norm's epsilon is no tensor.
            other = args[1]
            self.counts["bias" if isinstance(other, torch.Tensor) and other.dim() == 1 else name] += 1
        return result


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_results_are_those_of_evaluation_before_and_of_training(kind, pattern, dtype, tolerance):
    decoder, pattern = decoder_of(kind, dtype), PATTERNS[pattern]
    with torch.no_grad():
        before = run(decoder, states(dtype=dtype), pattern)
    in_place = run_in_place(decoder, states(dtype=dtype), pattern)
    assert in_place.shape == before.shape
    assert len(in_place) == (6 if isinstance(pattern, NoisyClean) else 12)
    torch.testing.assert_close(in_place, before, rtol=0, atol=tolerance)
    trained = run(decoder.train(), states(dtype=dtype), pattern)
    torch.testing.assert_close(in_place, trained, rtol=0, atol=tolerance)


@torch.no_grad()
def test_bf16_is_nearer_to_exact_results():
    """The sum is rounded once, not twice."""
    decoder = decoder_of(dtype=torch.bfloat16)
    given_SBH = states(dtype=torch.bfloat16)
    in_place, before = run_in_place(decoder, given_SBH), run(decoder, given_SBH)
    assert in_place.dtype == torch.bfloat16
    exact = run(decoder.double(), given_SBH.double())
    assert (in_place - exact).norm() < (before - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("positions, samples", [(1, 1), (1, 3), (5, 1), (7, 3)])
@torch.no_grad()
def test_every_length_and_batch(positions, samples):
    decoder, given_SBH = decoder_of(), states(positions, samples)
    torch.testing.assert_close(run_in_place(decoder, given_SBH), run(decoder, given_SBH), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "kind, added, by_themselves",
    [
        # The first residual is the caller's: its product is added to a copy.
        ("dense", {"addmm": 1, "addmm_": 2 * LAYERS - 1}, {"add_": 2 * LAYERS}),
        ("experts", {"addmm": 1, "addmm_": LAYERS - 1, "add_": LAYERS}, {"add_": 2 * LAYERS}),
        ("dense, then experts", {"addmm": 1, "addmm_": LAYERS, "add_": LAYERS - 1}, {"add_": 2 * LAYERS}),
        (
            "biases",
            # Megatron adds to a new tensor where the bias is trainable.
            {"addmm": 1, "addmm_": LAYERS - 1, "add": LAYERS, "bias": 2 * LAYERS},
            {"add": 2 * LAYERS, "bias": 2 * LAYERS},
        ),
    ],
)
@torch.no_grad()
def test_products_add_themselves(kind, added, by_themselves):
    decoder = decoder_of(kind)
    with Additions() as additions:
        run_in_place(decoder, states())
    assert additions.counts == added
    with Additions() as additions:
        run(decoder, states())
    assert additions.counts == by_themselves


@pytest.mark.parametrize("training, gradients", [(True, True), (False, True), (True, False)])
def test_training_and_gradients_are_as_they_were(training, gradients):
    decoder = decoder_of().train(training)
    with torch.set_grad_enabled(gradients), adding_in_place(decoder), Additions() as additions:
        output = run(decoder, states())
    assert additions.counts["add"] + additions.counts["add_"] == 2 * LAYERS
    assert not {"addmm", "addmm_"} & additions.counts.keys()
    assert output.requires_grad == gradients


@torch.no_grad()
def test_what_goes_in_and_what_came_out_stays():
    decoder = decoder_of()
    decoder.final_layernorm = None
    for given_SBH in (states(samples=1), states(samples=1).transpose(0, 1).contiguous().transpose(0, 1), states()):
        first = run_in_place(decoder, given_SBH)
        assert torch.equal(given_SBH, states(samples=given_SBH.size(1)))
        # The output of one pipeline stage is the input of the next.
        kept = first.clone()
        second = run_in_place(decoder, first)
        assert torch.equal(first, kept)
        assert not torch.equal(second, first)


@torch.no_grad()
def test_layers_called_by_hand_leave_their_inputs_alone():
    decoder = decoder_of()
    layer_outputs = [states()]
    for layer in decoder.layers:
        layer_outputs.append(layer(layer_outputs[-1], attention_bias=Bidirectional())[0])
    kept = [output.clone() for output in layer_outputs]
    layer_outputs[2] = decoder.layers[1](layer_outputs[1], attention_bias=Bidirectional())[0]
    assert all(map(torch.equal, layer_outputs, kept))


PLACES = {
    "layer": lambda decoder: decoder.layers[1],
    "norm of attention": lambda decoder: decoder.layers[1].input_layernorm,
    "norm of the MLP": lambda decoder: decoder.layers[1].pre_mlp_layernorm,
    "attention": lambda decoder: decoder.layers[1].self_attention,
    "MLP": lambda decoder: decoder.layers[1].mlp,
    "projection of attention": lambda decoder: decoder.layers[1].self_attention.linear_proj,
    "second layer of the MLP": lambda decoder: decoder.layers[1].mlp.linear_fc2,
}


@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_what_hooks_are_given_is_what_they_were_given_before(place):
    decoder, kept = decoder_of(), []
    module = PLACES[place](decoder)
    module.register_forward_pre_hook(
        lambda module, inputs, named: kept.extend((*inputs, *named.values())), with_kwargs=True
    )
    # Megatron's addition is in place too: to the output of a linear layer.
    is_linear = isinstance(module, RowParallelLinear)
    module.register_forward_hook(lambda module, inputs, output: kept.append(output[0].clone() if is_linear else output))
    run(decoder, states())
    run_in_place(decoder, states())
    given = [x for x in kept if isinstance(x, torch.Tensor | tuple)]
    half = len(given) // 2
    assert half >= 2
    torch.testing.assert_close(given[half:], given[:half], rtol=0, atol=1e-5)


@torch.no_grad()
def test_hooks_of_every_module_and_hooks_that_keep_nothing():
    decoder, seen = decoder_of(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        with Additions() as additions:
            run_in_place(decoder, states())
    finally:
        handle.remove()
    assert additions.counts == {"add_": 2 * LAYERS}
    assert seen
    decoder.layers[1].register_forward_pre_hook(keeps_no_tensor(lambda module, inputs: None))
    with Additions() as additions:
        run_in_place(decoder, states())
    assert additions.counts == {"addmm": 1, "addmm_": 2 * LAYERS - 1}


class Adapted(nn.Module):
    """A linear layer with something added to its output, whose samples come first in memory."""

    def __init__(self, linear):
        super().__init__()
        self.to_wrap = linear

    def forward(self, x):
        output, bias = self.to_wrap(x)
        return (output + 1).transpose(0, 1).contiguous().transpose(0, 1), bias


class Shifted(RowParallelLinear):
    """Megatron's layer with something added to its output."""

    def forward(self, x):
        output, bias = super().forward(x)
        return output + 1, bias


def shifted(linear):
    linear.__class__ = Shifted
    return linear


@pytest.mark.parametrize("change", [Adapted, shifted])
@torch.no_grad()
def test_what_is_more_than_a_product_is_called(change):
    decoder = decoder_of()
    plain = run_in_place(decoder, states())
    attention = decoder.layers[0].self_attention
    attention.linear_proj = change(attention.linear_proj)
    for layer in decoder.layers:
        layer.mlp.linear_fc2 = change(layer.mlp.linear_fc2)
    changed = run_in_place(decoder, states())
    torch.testing.assert_close(changed, run(decoder, states()), rtol=0, atol=1e-5)
    assert (changed - plain).abs().max() > 0.1


class OtherWeight(nn.Parameter):
    """Sharded or quantized, say."""


@pytest.mark.parametrize(
    "fields", [{"tensor_model_parallel_size": 2}, {"fp8": "hybrid"}, {"fp4": "nvfp4"}, {}], ids=str
)
@torch.no_grad()
def test_sums_over_ranks_and_other_weights_are_not_left_to_the_addition(fields):
    decoder = decoder_of()
    for field, value in fields.items():
        setattr(decoder.config, field, value)
    if not fields:
        linear = decoder.layers[0].mlp.linear_fc2
        linear.weight = OtherWeight(linear.weight)
    with adding_in_place(decoder):
        assert isinstance(decoder.layers[0].mlp(states())[0], torch.Tensor)


@torch.no_grad()
def test_autocast_decides_the_type_of_each_product():
    decoder = decoder_of(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), Additions() as additions:
        run_in_place(decoder, states(dtype=torch.bfloat16))
    assert additions.counts.keys() == {"add_"}


@torch.no_grad()
def test_recomputed_norms(monkeypatch):
    """Megatron frees their outputs once they were used, and asks the next output for its gradient."""
    # Names of Transformer Engine's that Megatron looks up, for fp8 or not.
    fp8 = SimpleNamespace(is_fp8_enabled=lambda: False)
    monkeypatch.setattr(megatron_random, "FP8GlobalStateManager", fp8, raising=False)
    monkeypatch.setattr(megatron_random, "activation_recompute_forward", lambda **_: nullcontext(), raising=False)
    decoder = decoder_of()
    expected = run(decoder, states())
    decoder.config.recompute_granularity, decoder.config.recompute_modules = "selective", ["layernorm"]
    for layer in decoder.layers:
        layer.recompute_input_layernorm = layer.recompute_pre_mlp_layernorm = True
    torch.testing.assert_close(run_in_place(decoder, states()), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "fields, context",
    [
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, torch.no_grad),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, torch.no_grad),
        ({}, lambda: torch.autocast("cpu", torch.bfloat16)),
        ({}, torch.inference_mode),
    ],
    ids=["recomputed MLP", "recomputed layers", "autocast", "inference mode"],
)
def test_other_ways_to_compute_give_what_they_gave(fields, context):
    decoder, given_SBH = decoder_of(**fields), states()
    with torch.no_grad(), context():
        expected, in_place = run(decoder, given_SBH), run_in_place(decoder, given_SBH)
    assert torch.equal(given_SBH, states())
    assert in_place.dtype == expected.dtype
    torch.testing.assert_close(in_place, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_failed_pass_leaves_nothing_behind():
    decoder = decoder_of()
    with pytest.raises(RuntimeError):
        run_in_place(decoder, states()[..., 1:])
    with Additions() as additions:
        run(decoder, states())
    assert additions.counts == {"add_": 2 * LAYERS}
