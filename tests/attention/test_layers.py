"""Layer specifications: which modules a diffusion model is built from, and the errors of the two choices."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_dllm.collections.diffusion.attention import layers
from nemo_dllm.collections.diffusion.attention.core import PatternAttention, eager, sdpa
from nemo_dllm.collections.diffusion.attention.flex import flex
from nemo_dllm.collections.diffusion.attention.norms import LocalLayerNorm, LocalRMSNorm
from nemo_dllm.collections.diffusion.attention.self_attention import FusedSelfAttention

pytestmark = pytest.mark.usefixtures("single_process")

DENSE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
CONFIGS = {
    "dense": DENSE,
    "q/k norm": {**DENSE, "qk_layernorm": True},
    "mixture of experts": {**DENSE, "num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False},
    "dense, then experts": {
        **DENSE,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "add_bias_linear": False,
        "moe_layer_freq": [0, 1],
        "qk_layernorm": True,
    },
}
without_transformer_engine = pytest.mark.skipif(
    layers.have_transformer_engine(), reason="Transformer Engine is installed"
)


def config_of(name, normalization="RMSNorm"):
    return TransformerConfig(normalization=normalization, **CONFIGS[name])


def modules_of(spec):
    """All classes that a specification names, with their place."""
    found = []

    def walk(place, value):
        if isinstance(value, ModuleSpec):
            walk(place, value.module)
            walk(place, value.submodules)
        elif isinstance(value, type):
            found.append((place, value))
        elif hasattr(value, "__dataclass_fields__"):
            for field in value.__dataclass_fields__:
                walk(f"{place}.{field}", getattr(value, field))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                walk(f"{place}[{index}]", item)

    walk("block", spec)
    return found


@pytest.mark.parametrize(
    "name, normalization",
    [(name, "RMSNorm") for name in CONFIGS] + [(name, "LayerNorm") for name in ("dense", "mixture of experts")],
)
def test_no_causal_core_and_no_norm_without_sequence_parallelism(name, normalization):
    spec = layers.diffusion_block_spec(config_of(name, normalization), transformer_impl="local")
    found = modules_of(spec)
    for place, cls in found:
        assert not issubclass(cls, DotProductAttention), place
        # WrappedTorchNorm makes a torch norm in its __new__, so it is no base of anything.
        assert cls is not WrappedTorchNorm, place
    norms = {cls for place, cls in found if "norm" in place and cls is not IdentityOp}
    assert norms == {{"RMSNorm": LocalRMSNorm, "LayerNorm": LocalLayerNorm}[normalization]}
    cores = [cls for place, cls in found if place.endswith("core_attention")]
    assert cores == [PatternAttention] * 2
    attentions = [layer.submodules.self_attention.module for layer in spec.layer_specs]
    assert attentions == [FusedSelfAttention] * 2
    kinds = [layer.submodules.self_attention.params["attn_mask_type"] for layer in spec.layer_specs]
    assert kinds == [AttnMaskType.no_mask] * 2


def test_the_walk_would_find_megatrons_own_modules():
    """The mutated twin: on Megatron's own specification the test above fails."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(config_of("q/k norm"), False, normalization="RMSNorm")
    assert {cls for _, cls in modules_of(spec)} >= {DotProductAttention, WrappedTorchNorm}


def test_megatrons_own_specification_is_not_changed():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = config_of("dense, then experts")
    before = modules_of(get_gpt_decoder_block_spec(config, False))
    layers.diffusion_block_spec(config, transformer_impl="local")
    assert modules_of(get_gpt_decoder_block_spec(config, False)) == before


@pytest.mark.parametrize("backend, kernel", [("sdpa", sdpa), ("eager", eager)], ids=["sdpa", "eager"])
def test_the_backend_chooses_the_kernels(backend, kernel):
    spec = layers.diffusion_block_spec(config_of("dense"), transformer_impl="local", attention_backend=backend)
    for layer in spec.layer_specs:
        core = layer.submodules.self_attention.submodules.core_attention
        assert core.params == {"bidirectional": kernel, "patterned": kernel}


@pytest.mark.parametrize(
    "fields, text",
    [
        (
            {"qk_layernorm": True, "normalization": "LayerNorm"},
            "qk_layernorm=True with normalization='LayerNorm' is not",
        ),
        ({"multi_latent_attention": True}, "multi_latent_attention=True is not supported .*; set .*=False"),
        ({"window_size": [4096, 0]}, r"window_size=\[4096, 0\] is not supported by bidirectional layers; set .*=None"),
        ({"softmax_type": "off-by-one"}, "softmax_type='off-by-one' is not supported .*; set softmax_type='vanilla'"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 is not supported"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_attention_that_ours_does_not_compute_is_refused(fields, text):
    config = TransformerConfig(**DENSE)
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(ValueError, match=text):
        layers.diffusion_block_spec(config)


@without_transformer_engine
def test_auto_is_local_without_transformer_engine():
    auto = layers.diffusion_block_spec(config_of("dense"))
    local = layers.diffusion_block_spec(config_of("dense"), transformer_impl="local", attention_backend="sdpa")
    assert modules_of(auto) == modules_of(local)


@pytest.mark.parametrize("cuda, patterned", [(True, flex), (False, sdpa)], ids=["GPU", "CPU"])
def test_auto_takes_flex_attention_for_patterns_on_a_gpu_only(monkeypatch, cuda, patterned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    spec = layers.diffusion_block_spec(config_of("dense"), transformer_impl="local")
    for layer in spec.layer_specs:
        core = layer.submodules.self_attention.submodules.core_attention
        assert core.params == {"bidirectional": sdpa, "patterned": patterned}


def test_flex_attention_is_refused_on_a_cpu_and_with_dropout(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"attention_backend='flex' needs a CUDA device: .*; use 'auto', .*or 'sdpa'"):
        layers.check_layer_choice("auto", "flex")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = config_of("dense")
    config.attention_dropout = 0.1
    with pytest.raises(
        ValueError, match=r"attention_dropout=0.1 is not supported by FlexAttention; set .*dropout=0 or"
    ):
        layers.diffusion_block_spec(config, transformer_impl="local", attention_backend="flex")
    config.attention_dropout = 0.0
    spec = layers.diffusion_block_spec(config, transformer_impl="local", attention_backend="flex")
    core = spec.layer_specs[0].submodules.self_attention.submodules.core_attention
    assert core.params == {"bidirectional": flex, "patterned": flex}


def drops_clean_half(spec):
    return [layer.submodules.self_attention.params.get("drop_clean", False) for layer in spec.layer_specs]


@pytest.mark.parametrize("name", CONFIGS)
def test_only_the_last_layer_of_the_last_pipeline_stage_drops_the_clean_half(name):
    config = config_of(name)
    assert drops_clean_half(layers.diffusion_block_spec(config, transformer_impl="local")) == [False, True]
    config.pipeline_model_parallel_size = 2
    try:
        parallel_state.set_pipeline_model_parallel_world_size(2)
        for rank, drops in ((0, [False]), (1, [True])):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            assert drops_clean_half(layers.diffusion_block_spec(config, transformer_impl="local")) == drops
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)


def test_sequence_parallelism_keeps_both_halves():
    """It cuts the sequence across them, so that the lengths on a rank would not match."""
    config = config_of("dense")
    config.sequence_parallel = True
    assert drops_clean_half(layers.diffusion_block_spec(config, transformer_impl="local")) == [False, False]


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        ValueError, match=r"attention_backend='flash' is unknown; choose from auto, sdpa, te, flex, eager"
    ):
        layers.check_layer_choice("auto", "flash")
    with pytest.raises(
        ValueError, match=r"transformer_impl='te' is unknown; choose from auto, local, transformer_engi"
    ):
        layers.check_layer_choice("te", "auto")
    with pytest.raises(ValueError, match=r"attention_backend='flash' is unknown"):
        layers.diffusion_block_spec(config_of("dense"), attention_backend="flash")


@without_transformer_engine
@pytest.mark.parametrize(
    "impl, backend, named",
    [
        ("auto", "te", "attention_backend='te' needs"),
        ("local", "te", "attention_backend='te' needs"),
        ("transformer_engine", "auto", "transformer_impl='transformer_engine' needs"),
        ("transformer_engine", "te", "transformer_impl='transformer_engine' and attention_backend='te' needs"),
    ],
)
def test_what_needs_transformer_engine_says_so(impl, backend, named):
    with pytest.raises(ValueError, match=named + r" Transformer Engine, which is not installed; install .*\[te\]"):
        layers.check_layer_choice(impl, backend)


@pytest.mark.parametrize("norm", [LocalRMSNorm, LocalLayerNorm])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norm_weights_are_marked_for_the_gradient_reduction_of_sequence_parallelism(norm, sequence_parallel):
    config = config_of("dense")
    config.sequence_parallel = sequence_parallel
    parameters = list(norm(config=config, hidden_size=32, eps=1e-6).parameters())
    assert parameters
    assert all(parameter.sequence_parallel is sequence_parallel for parameter in parameters)


def test_norms_compute_what_they_say():
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]])
    rms = LocalRMSNorm(config=config_of("dense"), hidden_size=4, eps=0.75)
    # mean of squares 6.25, plus eps 0.75: divided by the root of 7.
    torch.testing.assert_close(rms(x), x / 7**0.5)
    layer_norm = LocalLayerNorm(config=config_of("dense"), hidden_size=4, eps=0.4375)
    # mean 1.75, variance 3.1875, plus eps: 3.625.
    torch.testing.assert_close(layer_norm(x), (x - 1.75) / 3.625**0.5)


@pytest.mark.parametrize("norm", [LocalRMSNorm, LocalLayerNorm])
def test_zero_centred_norm_weights_are_refused(norm):
    config = config_of("dense")
    config.layernorm_zero_centered_gamma = True
    with pytest.raises(ValueError, match=r"layernorm_zero_centered_gamma=True needs Transformer Engine; install"):
        norm(config=config, hidden_size=8)
