"""Key tables of families with experts: whole models, parts of them, and what does not fit."""

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

NAMES = ("qwen3_moe", "sdar_moe", "llada_moe", "llada_moe_dense_shared", "llada2_moe")


def weights(folder):
    return load_file(folder / "model.safetensors")


def export(core):
    from nemo_dllm.connectors.load import export_hf_tensors

    return dict(export_hf_tensors(core))


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)


@pytest.mark.parametrize("name", NAMES)
def test_export_gives_every_tensor_back(load, models, name):
    assert_equal(export(load(models / name)), weights(models / name))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_and_bias_is_written(build_core, models, name):
    from nemo_dllm.connectors.load import load_hf_weights

    core = build_core(models / name)
    for buffer in core.buffers():
        buffer.fill_(float("nan"))
    load_hf_weights(core, models / name)
    assert not [key for key, value in core.state_dict().items() if value is not None and value.isnan().any()]


def test_expert_biases_are_no_parameters(load, models):
    core = load(models / "llada2_moe")
    biases = [name for name, _ in core.named_buffers() if name.endswith("expert_bias")]
    assert biases == [f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (1, 2)]
    assert not [name for name, _ in core.named_parameters() if "expert_bias" in name]
    golden = weights(models / "llada2_moe")["model.layers.2.mlp.gate.expert_bias"]
    assert torch.equal(core.decoder.layers[2].mlp.router.expert_bias, golden)


def test_expert_biases_stay_in_full_precision(build_core, models):
    from nemo_dllm.connectors.load import load_hf_weights

    core = build_core(models / "llada2_moe").bfloat16()
    load_hf_weights(core, models / "llada2_moe")
    golden = weights(models / "llada2_moe")["model.layers.2.mlp.gate.expert_bias"]
    assert torch.equal(core.decoder.layers[2].mlp.router.expert_bias, golden)
    assert core.decoder.layers[2].mlp.router.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("llada2_moe", "model.layers.1.mlp.gate.expert_bias", "tensors that the checkpoint lacks"),
        ("llada2_moe", "model.layers.0.mlp.gate.expert_bias", "tensors that the model has no place for"),
        ("llada_moe", "model.layers.0.mlp.expert_bias", "tensors that the model has no place for"),
        ("qwen3_moe", "model.layers.1.mlp.experts.7.up_proj.weight", "tensors that the checkpoint lacks"),
        ("qwen3_moe", "model.layers.1.mlp.experts.8.up_proj.weight", "tensors that the model has no place for"),
        ("llada_moe_dense_shared", "model.layers.2.shared_expert.up_proj.weight", "tensors that the checkpoint lacks"),
    ],
)
def test_names_what_does_not_fit(load, models, make_twin, name, tensor, message):
    def change(tensors):
        if tensor in tensors:
            del tensors[tensor]
        else:
            tensors[tensor] = torch.zeros(8)

    with pytest.raises(ValueError, match=rf"{message} \(1\): {tensor}$"):
        load(make_twin(name, change))


def test_stacked_queries_keys_and_values_by_hand():
    """4 query heads of one row each in 2 groups."""
    from nemo_dllm.connectors.families.llada2 import StackedQueryKeyValue
    from nemo_dllm.connectors.key_table import ModelDimensions, TensorRank

    dimensions = ModelDimensions(heads=4, query_groups=2, head_dim=1, vocab_size=7)
    stacked = torch.tensor([[0.0], [1], [2], [3], [10], [11], [20], [21]])
    whole, first, second = [0, 1, 10, 20, 2, 3, 11, 21], [0, 1, 10, 20], [2, 3, 11, 21]
    layout, asked = StackedQueryKeyValue(), []

    def read(index, rows):
        asked.append((index, rows.start, rows.stop))
        return stacked[rows]

    for values, rank in ((whole, TensorRank(0, 1)), (first, TensorRank(0, 2)), (second, TensorRank(1, 2))):
        part = layout.read(read, (len(values), 1), rank, dimensions)
        assert part[:, 0].tolist() == values
        assert layout.hf_shapes((len(values), 1), rank.size, dimensions) == [(8, 1)]
    assert asked[-3:] == [(0, 2, 4), (0, 5, 6), (0, 7, 8)]
    parts = [torch.tensor(values, dtype=torch.float)[:, None] for values in (first, second)]
    assert torch.equal(layout.write(parts, dimensions)[0], stacked)


@pytest.mark.parametrize("name", ["qwen3_moe", "llada2_moe"])
def test_experts_are_found_under_the_names_of_transformer_engine(build_core, models, name):
    """Its grouped layers keep the weights of all experts as numbered parameters."""
    from nemo_dllm.connectors.load import load_hf_weights

    core = build_core(models / name)
    for layer in core.decoder.layers:
        if not hasattr(layer.mlp, "router"):
            continue
        grouped = torch.nn.Module()
        for linear in ("linear_fc1", "linear_fc2"):
            module = torch.nn.Module()
            for number, expert in enumerate(layer.mlp.experts.local_experts):
                module.register_parameter(f"weight{number}", getattr(expert, linear).weight)
            grouped.add_module(linear, module)
        layer.mlp.experts = grouped
    load_hf_weights(core, models / name)
    assert_equal(export(core), weights(models / name))


def test_the_bias_of_a_softmax_router_is_part_of_choice_and_weights(load, make_twin):
    def add_bias(tensors):
        for layer in range(2):
            tensors[f"model.layers.{layer}.mlp.expert_bias"] = torch.linspace(-0.2, 0.3, 8) * (layer + 1)

    twin = make_twin("llada_moe", add_bias, moe_router_enable_expert_bias=True)
    core = load(twin)
    assert_equal(export(core), weights(twin))
    router = core.decoder.layers[1].mlp.router
    hidden = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0))
    weighed, chosen = router(hidden)
    scores = (hidden.flatten(0, 1) @ router.weight.t()).softmax(-1) + torch.linspace(-0.2, 0.3, 8) * 2
    best, index = scores.topk(3)
    assert torch.allclose(weighed, torch.zeros(10, 8).scatter(1, index, best), atol=1e-6)
    assert torch.equal(chosen, torch.zeros(10, 8, dtype=torch.bool).scatter(1, index, True))


def test_a_softmax_router_with_a_bias_has_no_auxiliary_loss():
    from nemo_dllm.collections.diffusion.models.llada_moe import LLaDAMoEConfig7B_A1B

    with pytest.raises(ValueError, match="softmax_expert_bias=True with moe_aux_loss_coeff=0.01 is not supported"):
        LLaDAMoEConfig7B_A1B(softmax_expert_bias=True, moe_aux_loss_coeff=0.01)


@torch.no_grad()
@pytest.mark.parametrize("normalised", [True, False])
def test_dense_layers_among_sparse_ones_as_transformers_has_them(load, tmp_path, normalised):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from nemo_dllm.collections.diffusion.attention.masks import BlockCausal

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=normalised,
        initializer_range=0.1,
    )
    reference = Qwen3MoeForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(200, (2, 12))
    core = load(tmp_path)
    assert core.config.moe_layer_freq == [0, 1, 0, 0, 0]
    assert core.config.moe_router_pre_softmax is not normalised
    assert torch.allclose(core(tokens, None, BlockCausal(1)), reference(tokens).logits, rtol=0, atol=2e-5)
    assert_equal(export(core), weights(tmp_path))
