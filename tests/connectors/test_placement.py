import pytest
import torch
from torch import nn

pytestmark = pytest.mark.nemo


def tree(names):
    """A module whose state dict has these names."""
    root = nn.Module()
    for name in names:
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(leaf, nn.Parameter(torch.zeros(1)))
    return root


@pytest.fixture
def second_half(monkeypatch):
    """The second of two pipeline stages and of two expert-parallel ranks: layers 2 and 3, experts 2 and 3."""
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_rank", lambda: 1)
    mlp = "decoder.layers.1.mlp."
    chunk = tree(
        [
            "decoder.layers.0.self_attention.linear_proj.weight",
            f"{mlp}experts.local_experts.1.linear_fc1.weight",
            f"{mlp}experts.linear_fc2.weight0",
            f"{mlp}shared_experts.linear_fc1.weight",
            "output_layer.weight",
        ]
    )
    chunk.register_buffer("scratch", torch.zeros(1), persistent=False)
    chunk.register_buffer("kept", torch.zeros(1))
    chunk.config = type("Config", (), {"num_moe_experts": 4})
    chunk.pre_process, chunk.post_process = False, True
    chunk.decoder.layers._modules["0"].layer_number, chunk.decoder.layers._modules["1"].layer_number = 3, 4
    chunk.decoder.layers = nn.ModuleList(chunk.decoder.layers.children())
    return chunk


def test_layers_and_experts_count_through_the_whole_model(second_half):
    from nemo_dllm.connectors.placement import parameters_of

    assert set(parameters_of(second_half)) == {
        "decoder.layers.2.self_attention.linear_proj.weight",
        "decoder.layers.3.mlp.experts.local_experts.3.linear_fc1.weight",
        "decoder.layers.3.mlp.experts.linear_fc2.weight2",
        "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
        "output_layer.weight",
        "kept",
    }


def test_a_process_has_the_entries_of_its_stage_layers_and_experts(second_half):
    from nemo_dllm.connectors.key_table import KeyTable, Replicated, Row
    from nemo_dllm.connectors.placement import entries_of

    table = KeyTable(
        rows=(
            Row(("embedding.word_embeddings.weight",), ("embed",), Replicated()),
            Row(("decoder.layers.{layer}.a",), ("a.{layer}",), Replicated(), range(4)),
            Row(("decoder.layers.{layer}.e.{expert}",), ("e.{layer}.{expert}",), Replicated(), range(3), range(4)),
            Row(("embedding.word_embeddings.weight", "output_layer.weight"), ("tied",), Replicated()),
            Row(("decoder.final_layernorm.weight",), ("norm",), Replicated()),
        ),
        ignored={},
    )
    names = [entry.hf[0] for entry in entries_of(second_half, table)]
    assert names == ["a.2", "a.3", "e.2.2", "e.2.3", "tied", "norm"]
