"""What the Qwen3 recipes claim: sizes, layouts that fit, tokens per step."""

import pytest

pytestmark = pytest.mark.nemo

GPU_BYTES, RESERVE_BYTES = 80e9, 20e9


@pytest.fixture(scope="module")
def qwen3():
    from nemo_dllm.recipes import qwen3

    return qwen3


@pytest.fixture(scope="module")
def configs(qwen3):
    import fiddle as fdl

    return {size: fdl.build(qwen3.mdlm_pretrain(size).model.config) for size in qwen3.SIZES}


def count_parameters(config):
    """By hand: attention with a norm for queries and one for keys, SwiGLU, two norms a layer, one at the end."""
    hidden, head = config.hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * head, config.num_query_groups * head
    attention = 2 * hidden * queries + 2 * hidden * keys + 2 * head
    layer = attention + 3 * hidden * config.ffn_hidden_size + 2 * hidden
    tables = 1 if config.share_embeddings_and_output_weights else 2
    return config.num_layers * layer + hidden + tables * config.vocab_size * hidden


def recipes_of(qwen3, recipes):
    """(name, size, recipe) of all recipes of the family."""
    family = [(name, recipe) for name, recipe in recipes.items() if name.startswith("qwen3_")]
    assert len(family) == 4 * len(qwen3.SIZES)
    return [(name, qwen3.SIZES[name.split("_")[1]], recipe) for name, recipe in family]


def test_parameters_as_published(qwen3, configs):
    assert {size: facts.parameters for size, facts in qwen3.SIZES.items()} == {
        "0p6b": 596_049_920,
        "1p7b": 1_720_574_976,
        "4b": 4_022_468_096,
        "8b": 8_190_735_360,
        "14b": 14_768_307_200,
        "32b": 32_762_123_264,
    }
    for size, config in configs.items():
        assert count_parameters(config) == qwen3.SIZES[size].parameters, size


@pytest.mark.usefixtures("single_process")
def test_the_built_model_has_as_many(qwen3):
    """Every size, without memory for any."""
    import fiddle as fdl
    from torch._subclasses.fake_tensor import FakeTensorMode

    for size, facts in qwen3.SIZES.items():
        recipe = qwen3.mdlm_pretrain(size)
        recipe.model.config.perform_initialization = False
        model = fdl.build(recipe.model)
        with FakeTensorMode():
            model.configure_model()
        assert sum(parameter.numel() for parameter in model.module.parameters()) == facts.parameters, size


def test_models_divide_over_their_layouts(qwen3, recipes):
    import fiddle as fdl

    for name, _, recipe in recipes_of(qwen3, recipes):
        config, strategy = fdl.build(recipe.model.config), recipe.trainer.strategy
        tensor, pipeline = strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size
        for size in (config.num_attention_heads, config.num_query_groups, config.ffn_hidden_size, config.vocab_size):
            assert size % tensor == 0, name
        assert recipe.data.seq_length % (tensor * strategy.context_parallel_size) == 0, name
        assert config.num_layers % pipeline == 0, name
        assert tensor <= recipe.trainer.devices, name


def test_models_fit_their_gpus(qwen3, recipes):
    """bf16 weights, fp32 gradients, and fp32 weights and two moments split over the ranks that read data; activations
    of 34 bytes per token, hidden unit and layer (Korthikanti et al., 2022), attention matrix apart."""
    import fiddle as fdl

    for name, facts, recipe in recipes_of(qwen3, recipes):
        config, strategy = fdl.build(recipe.model.config), recipe.trainer.strategy
        tensor, pipeline = strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size
        data_parallel = recipe.trainer.devices * recipe.trainer.num_nodes // (tensor * pipeline)
        # The first and the last stage hold a table beside their layers.
        table = config.vocab_size * config.hidden_size
        tables = table if config.share_embeddings_and_output_weights else 2 * table
        held = ((facts.parameters - tables) / pipeline + (tables if pipeline == 1 else table)) / tensor
        # As many micro-batches are under way as there are stages, each in a stage's share of the layers.
        tokens = recipe.data.micro_batch_size * recipe.data.seq_length
        activations = 34 * tokens * config.hidden_size * config.num_layers / tensor
        needed = held * (2 + 4 + 12 / data_parallel) + activations
        assert needed < GPU_BYTES - RESERVE_BYTES, (name, needed)


def test_a_step_is_a_million_tokens(qwen3, recipes):
    for name, _, recipe in recipes_of(qwen3, recipes):
        assert recipe.data.global_batch_size * recipe.data.seq_length == 2**20, name
        assert recipe.data.num_val_rows % recipe.data.global_batch_size == 0, name
        assert recipe.data.seq_length == recipe.model.config.seq_length, name


def test_model_and_data_agree_on_the_vocabulary(qwen3, recipes):
    import fiddle as fdl

    for name, _, recipe in recipes_of(qwen3, recipes):
        vocab_size = fdl.build(recipe.model.config).vocab_size
        assert recipe.data.vocab_size == vocab_size, name
        assert recipe.data.mask_token_id == recipe.model.objective.mask_token_id < vocab_size, name


def test_what_the_four_recipes_of_a_size_differ_in(qwen3):
    from nemo_dllm.collections.diffusion.models.a2d import A2DModel
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.recipes import tasks

    for factory, model_class, task in (
        (qwen3.mdlm_pretrain, MDLMModel, tasks.pretrain),
        (qwen3.mdlm_finetune, MDLMModel, tasks.finetune),
        (qwen3.a2d_pretrain, A2DModel, tasks.pretrain),
        (qwen3.a2d_finetune, A2DModel, tasks.finetune),
    ):
        recipe = factory("0p6b")
        assert recipe.model.__fn_or_cls__ is model_class
        assert recipe.__fn_or_cls__ is task


def test_start_weights(qwen3):
    assert qwen3.a2d_finetune("8b").resume.restore_config is None
    recipe = qwen3.a2d_finetune("8b", init_from="folder")
    assert recipe.resume.restore_config.path == "folder"
    # What a run finds of its own wins over them.
    assert recipe.resume.resume_from_path is None


def test_unknown_size(qwen3):
    with pytest.raises(ValueError, match="size='7b' is unknown; choose from 0p6b, 1p7b, 4b, 8b, 14b, 32b"):
        qwen3.mdlm_pretrain("7b")
