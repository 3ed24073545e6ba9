"""What the estimate of memory adds up, against numbers worked out by hand for a model of a few layers."""

import pytest

pytestmark = pytest.mark.nemo

TABLE = 100 * 64
# Queries, keys, values and output of 4 heads over 2 groups of 16; an MLP of 96.
DIVIDED = 2 * 64 * (64 + 32) + 3 * 64 * 96
NORMS = 2 * 64 + 2 * 16
PARAMETERS = 2 * TABLE + 4 * (DIVIDED + NORMS) + 64


@pytest.fixture(scope="module")
def config():
    """Of a model of four layers, with edits."""
    from nemo.collections import llm

    sizes = dict(num_layers=4, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2)

    def config(config_class=llm.Qwen3Config, **fields):
        untied = {"share_embeddings_and_output_weights": False}
        return config_class(**{**sizes, **untied, "kv_channels": 16, "vocab_size": 100, **fields})

    return config


@pytest.fixture(scope="module")
def estimate():
    """Of a configuration, for fields of a strategy on some GPUs."""
    from nemo_dllm.recipes.builder import layout_of_strategy
    from nemo_dllm.recipes.memory import estimate_memory

    def estimate(config, strategy=None, gpus=1, positions=128, **named):
        return estimate_memory(config, layout_of_strategy(strategy or {}, gpus), positions, **named)

    return estimate


@pytest.fixture(scope="module")
def layer():
    """Bytes of a layer, for fields of a strategy."""
    from nemo_dllm.recipes.activations import layer_bytes
    from nemo_dllm.recipes.builder import layout_of_strategy

    def layer(config, strategy=None, **named):
        return layer_bytes(config, layout_of_strategy(strategy or {}, 8), **named)

    return layer


def test_one_gpu(config, estimate):
    memory = estimate(config())
    assert PARAMETERS == 136_384
    assert (memory.weights, memory.gradients, memory.optimizer) == (272_768, 545_536, 1_636_608)
    # 864 values of each position: 4 x 64, 3 x 64 of queries, 2 x 64 of keys and values, 3 x 96.
    assert memory.activations == 128 * 4 * 2 * 864
    # A chunk of logits and the head's gradient, fp32 and bf16; four times the hidden states of 128 positions.
    assert memory.logits == 2 * 128 * 100 + 6 * TABLE + 4 * 2 * 128 * 64
    assert memory.total == 272_768 + 545_536 + 1_636_608 + 884_736 + 129_536


@pytest.mark.usefixtures("single_process")
def test_what_megatron_allocates_for_weights_gradients_and_optimizer(config, estimate):
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.build import build_on_cpu

    half = config(bf16=True, params_dtype=torch.bfloat16)
    model = MDLMModel(half, MaskedDiffusion(mask_token_id=99))
    build_on_cpu(model)
    distributed = {"use_distributed_optimizer": True}
    data_parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **distributed)
    wrapped = DistributedDataParallel(half, data_parallel, model.module.bfloat16())
    settings = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, **distributed)
    optimizer = get_megatron_optimizer(settings, [wrapped])
    for parameter in wrapped.parameters():
        parameter.main_grad.fill_(0.1)
    optimizer.step()

    memory = estimate(half)
    (adam,) = [part.optimizer for part in optimizer.chained_optimizers]
    state = [value for parameter in adam.state for value in (parameter, *adam.state[parameter].values())]
    assert sum(value.nbytes for value in state) == memory.optimizer
    # Buffers are rounded up.
    (buffer,) = wrapped.buffers
    assert memory.weights <= buffer.param_data.nbytes < 1.01 * memory.weights
    assert memory.gradients <= buffer.grad_data.nbytes < 1.01 * memory.gradients


def test_two_chunks_of_logits_are_there_at_once_where_there_are_more_than_one(config, estimate):
    large = config(vocab_size=10_000)
    one, more = (estimate(large, positions=8192, scored=scored).logits for scored in (4096, 4097))
    chunk, table = 2 * 4096 * 10_000, 10_000 * 64
    assert one == chunk + 6 * table + 4 * 2 * 4096 * 64
    assert more == 2 * chunk + 4 * table + 4 * 2 * 4097 * 64


def test_tensor_parallel_gpus_each_hold_norms_and_the_hidden_states_unless_they_divide_the_sequence(config, estimate):
    divided = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    memory = estimate(config(), divided, gpus=2)
    held = TABLE + 4 * (DIVIDED / 2 + NORMS) + 64
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * held, 4 * held, 12 * held)
    assert memory.activations == 128 * 4 * 864
    whole = estimate(config(), {"tensor_model_parallel_size": 2}, gpus=2)
    assert whole.activations == 128 * 4 * (864 + 4 * 64)
    # Data-parallel GPUs share the optimizer's state only.
    more = estimate(config(), divided, gpus=4)
    assert (more.weights, more.optimizer) == (2 * held, 6 * held)


def test_context_parallel_gpus_keep_the_keys_and_values_of_all(config, estimate):
    memory = estimate(config(), {"context_parallel_size": 4}, gpus=4)
    assert (memory.weights, memory.optimizer) == (2 * PARAMETERS, 3 * PARAMETERS)
    gathered = 2 * (864 + 3 * 64)
    assert memory.activations == 32 * 4 * gathered
    assert memory.logits == 2 * 32 * 100 + 6 * TABLE + 4 * 2 * 32 * 64
    selective = config(recompute_granularity="selective", recompute_modules=["core_attn"])
    assert estimate(selective, {"context_parallel_size": 4}, gpus=4).activations == 32 * 4 * 2 * 864


def test_the_backward_pass_of_a_layer(config, layer):
    plain = layer(config())
    assert (plain.entry, plain.kept, plain.dropped) == (128, 1728, 0)
    # Gradients of the residual and of the output, and of the MLP's first product.
    assert plain.working == 2 * (2 * 64 + 2 * 96)
    # Attention's: of the queries once, of 8 x 64 gathered keys and values three times; the MLP's 288 + 128 are gone.
    assert layer(config(), {"context_parallel_size": 8}).working == 2 * (128 + 64 + 3 * 512 - 288 - 128)
    mlp = layer(config(), recomputed=("mlp",))
    assert (mlp.kept, mlp.dropped, mlp.whole) == (1728 - 576, 576, 1728)


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "layers"),
    [
        ({}, None, 2 * 2),
        ({}, 1, 2),
        # Chunks of one layer: two forward passes more than the last stage for each chunk, and three until it begins.
        ({"virtual_pipeline_model_parallel_size": 2}, None, 5),
        ({"virtual_pipeline_model_parallel_size": 2}, 2, 4),
    ],
)
def test_pipeline_stages_hold_what_is_under_way(config, estimate, strategy, micro_batches, layers):
    # So many positions that the first stage is the fullest.
    fields = {"pipeline_model_parallel_size": 2, **strategy}
    memory = estimate(config(vocab_size=4), fields, gpus=2, positions=4096, scored=1, micro_batches=micro_batches)
    assert memory.activations == 4096 * (layers * 1728 + 640)
    held = 2 * (DIVIDED + NORMS) + 4 * 64 + 64
    assert (memory.weights, memory.optimizer) == (2 * held, 12 * held)


@pytest.mark.parametrize(
    ("method", "number", "kept", "added"),
    [
        ("uniform", 1, 4 * 128, 1728 - 128 + 640),
        ("uniform", 2, 2 * 128, 2 * 1728 - 128 + 640),
        ("uniform", 3, 2 * 128, 3 * 1728 - 128 + 640),
        # The last layers are kept; when the first ones' turn comes they are gone.
        ("block", 1, 128 + 3 * 1728, 640),
        ("block", 4, 4 * 128, 1728 - 128 + 640),
    ],
)
def test_recomputation_of_whole_layers(config, estimate, method, number, kept, added):
    recomputed = config(
        vocab_size=4, recompute_granularity="full", recompute_method=method, recompute_num_layers=number
    )
    assert estimate(recomputed, positions=4096, scored=1).activations == 4096 * (kept + added)


def test_a_table_for_embedding_and_head_has_its_gradient_at_the_end_only(config, estimate):
    tied = config(share_embeddings_and_output_weights=True)
    memory = estimate(tied, positions=4096, scored=1)
    assert memory.logits == 2 * TABLE
    assert memory.weights == 2 * (PARAMETERS - TABLE)
    assert estimate(config(), positions=4096, scored=1).logits == 0


def test_fully_sharded_gpus_divide_all_but_what_is_gathered(config, estimate):
    layer = DIVIDED + NORMS
    shard, tables = PARAMETERS / 4, 2 * 2 * TABLE
    memory = estimate(config(), {"fsdp": "megatron", "context_parallel_size": 2}, gpus=4, positions=8192, scored=1)
    # Before the last layer's backward pass, all four layers are gathered: together below half a billion.
    assert memory.weights == 2 * shard + tables + 2 * 4 * layer
    # The head's gradient waits in fp32; the layer's is there in both precisions.
    assert memory.gradients == 4 * (shard + TABLE + layer) + 2 * layer
    assert memory.optimizer == 12 * shard
    assert memory.activations == 4096 * (4 * (1728 + 128) + 640)
    # Without activations, the end is the fullest: all gradients wait, and the embedding's is there in bf16 too.
    memory = estimate(config(vocab_size=1000), {"fsdp": "megatron"}, gpus=4, positions=1)
    table = 1000 * 64
    assert memory.gradients == 4 * ((2 * table + 4 * layer + 64) / 4 + 4 * layer + 2 * table) + 2 * table
    assert memory.activations == 0


def test_fully_sharded_gradients_wait_up_to_a_billion(estimate):
    from nemo.collections import llm

    config = llm.Qwen3Config8B()
    table, layer = 151936 * 4096, 2 * 4096 * (4096 + 1024) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    shard = (2 * table + 36 * layer + 4096) / 4
    memory = estimate(config, {"fsdp": "megatron"}, gpus=4, positions=2048)
    # Layers of 193 million: one is done when the queue is full, the next is being done, and three are gathered ahead.
    assert memory.gradients == 4 * (shard + 1e9 + 2 * layer) + 2 * layer
    assert memory.weights == 2 * (shard + 2 * table + 4 * layer)
    assert memory.total == pytest.approx(56.4e9, rel=0.002)


def test_experts_with_a_shared_one_and_a_dense_layer(config, estimate, layer):
    from nemo.collections.llm.gpt.model.qwen3 import Qwen3MoEConfig

    from nemo_dllm.recipes.moe_fields import SOFTMAX_ROUTER

    experts = dict(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=32, moe_layer_freq=[0, 1, 1, 1])
    sparse = config(Qwen3MoEConfig, **SOFTMAX_ROUTER, **experts, moe_shared_expert_intermediate_size=48)
    # Two experts' inputs and 3 x 32 units, 3 x 48 shared ones, and three fp32 scores of eight.
    kept = 2 * (864 - 288 + 2 * (64 + 96) + 144 + 48)
    assert layer(sparse, sparse=True).kept == kept
    attention = DIVIDED - 3 * 64 * 96
    held = 2 * TABLE + 4 * (attention + NORMS) + 3 * 64 * 96 + 3 * (64 * 8 + 3 * 64 * 48) + 64
    routed = 3 * 8 * 3 * 64 * 32
    memory = estimate(sparse, {"expert_model_parallel_size": 2}, gpus=4)
    assert memory.weights == 2 * (held + routed / 2)
    assert memory.optimizer == 12 * (held / 4 + routed / 4)
    # Three copies of the tokens on their way to two experts each, and the gradients of two hidden states.
    assert memory.activations == 128 * (1728 + 3 * kept + 2 * (3 * 2 * 64 + 2 * 64))
    # Cut in two, an expert sees the tokens of both ranks.
    cut = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2}
    assert layer(sparse, cut, sparse=True).kept == 864 - 288 + 2 * (2 * 64 + 96) + 144 + 48
    assert layer(sparse, recomputed=("shared_experts",), sparse=True).dropped == 2 * 144
    assert layer(sparse, recomputed=("moe",), sparse=True).kept == 2 * (864 - 288)


def test_data_and_objective_give_the_positions(config):
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
    from nemo_dllm.recipes.builder import Layout
    from nemo_dllm.recipes.memory import estimate_memory, estimate_training_memory

    layout = Layout(gpus_per_node=4, pipeline=2)
    sizes = dict(seq_length=64, micro_batch_size=2, global_batch_size=4)
    masked = estimate_training_memory(config(), MaskedDiffusion(mask_token_id=99), layout, **sizes)
    assert masked == estimate_memory(config(), layout, 128, micro_batches=1)
    block = estimate_training_memory(config(), BlockDiffusion(mask_token_id=99, block_size=8), layout, **sizes)
    assert block == estimate_memory(config(), layout, 256, scored=128, micro_batches=1)


def test_a_strategy_and_its_layout():
    from nemo_dllm.recipes.builder import Layout, layout_of_strategy, strategy_fields

    fields = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}
    layout = layout_of_strategy({**fields, "fsdp": "megatron"}, 16)
    assert layout == Layout(2, 8, tensor=2, context=2, expert_tensor=2, fully_sharded=True)
    assert layout_of_strategy({}, 3) == Layout(1, 3)
    whole_sequence = Layout(tensor=4, sequence=False, expert=2, expert_tensor=2)
    for layout in (Layout(), whole_sequence, Layout(1, 6, pipeline=3, virtual=2), Layout(fully_sharded=True)):
        gpus = layout.num_nodes * layout.gpus_per_node
        assert layout_of_strategy(strategy_fields(layout), gpus) == layout


def test_frozen_weights_have_neither_gradients_nor_moments(config, estimate):
    """Of adapters alone, whose parts all ranks hold alike; the head forms no gradient of its weights either."""
    whole, adapted = estimate(config()), estimate(config(), adapters=1000)
    assert adapted.weights == 2 * (PARAMETERS + 1000)
    assert (adapted.gradients, adapted.optimizer) == (4 * 1000, 12 * 1000)
    assert adapted.activations == whole.activations
    divided = estimate(config(), {"tensor_model_parallel_size": 2, "sequence_parallel": True}, gpus=4, adapters=1000)
    assert (divided.gradients, divided.optimizer) == (4 * 500, 3 * 1000)


@pytest.mark.parametrize(
    "target_modules", [["linear_qkv", "linear_proj"], ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]]
)
def test_adapters_are_counted_as_they_are_built(single_process, config, target_modules):
    from nemo_dllm.collections.diffusion.models.lora import LoRA, add_adapters
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.recipes.memory import count_adapters

    model = MDLMModel(config(num_layers=2), MaskedDiffusion(mask_token_id=99), transformer_impl="local")
    model.configure_model()
    add_adapters(model.module, LoRA(target_modules=target_modules, dim=3))
    trained = sum(parameter.numel() for name, parameter in model.named_parameters() if ".adapter." in name)
    assert trained == count_adapters(config(num_layers=2), 3, target_modules)
    assert count_adapters(config(num_layers=2), 3, ["decoder.layers.*.self_attention.linear_proj", "other"]) > 0
