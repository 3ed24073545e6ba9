"""What the recipes of all families claim: sizes, layouts that fit, tokens per step."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

GPU_BYTES, RESERVE_BYTES = 80e9, 20e9
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"

# Published numbers of parameters, a tied head counted once.
PUBLISHED = {
    "qwen3_0p6b": 596_049_920,
    "qwen3_1p7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen25_0p5b": 494_032_768,
    "qwen25_7b": 7_615_616_512,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama31_8b": 8_030_261_248,
    "llama31_70b": 70_553_706_496,
    "llama32_1b": 1_235_814_400,
    "llama32_3b": 3_212_749_824,
    "llada_8b": 8_015_581_184,
    "dream_7b": 7_615_616_512,
    "sdar_1p7b": 2_031_739_904,
    "sdar_4b": 4_411_424_256,
    "sdar_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "sdar_30b_a3b": 30_532_122_624,
    "llada_moe_7b_a1b": 7_356_880_896,
    "llada2_mini": 16_255_638_528,
    "llada2_flash": 102_889_697_280,
}


@pytest.fixture(scope="module")
def family_recipes():
    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.recipes import family_recipes

    return family_recipes


@pytest.fixture(scope="module")
def sizes(family_recipes):
    """(family, size's name, size, its configuration) of all families, by the first parts of their recipes' names."""
    import fiddle as fdl

    def config(family, size):
        recipe = family_recipes.family_recipe(family, size, family.kinds[0], "pretrain", name="x")
        return fdl.build(recipe.model.config)

    return {
        f"{family.name}_{size}": (family, size, facts, config(family, size))
        for family in family_recipes.FAMILIES
        for size, facts in family.sizes.items()
    }


@pytest.fixture(scope="module")
def all_recipes(family_recipes, sizes):
    """(name, kind, facts, configuration, recipe) of all recipes of all families."""
    return [
        (name, kind, facts, config, family_recipes.family_recipe(family, size, kind, task, name=name))
        for family, size, facts, config in sizes.values()
        for kind in family.kinds
        for task in family_recipes.TASKS
        for name in [family_recipes.recipe_name(family, size, kind, task)]
    ]


def count_parameters(config):
    """By hand: attention, its biases and norms where it has any, SwiGLU, two norms a layer, one at the end."""
    hidden, head = config.hidden_size, config.kv_channels
    queries, keys = config.num_attention_heads * head, config.num_query_groups * head
    attention = 2 * hidden * queries + 2 * hidden * keys
    attention += 2 * head if config.qk_layernorm else 0
    attention += queries + 2 * keys if config.add_qkv_bias else 0
    tables = 1 if config.share_embeddings_and_output_weights else 2
    total = config.num_layers * (attention + 2 * hidden) + hidden + tables * config.vocab_size * hidden
    for layer in range(config.num_layers):
        frequency = config.moe_layer_freq
        if config.num_moe_experts and (frequency == 1 or frequency[layer]):
            width = config.num_moe_experts * config.moe_ffn_hidden_size
            width += config.moe_shared_expert_intermediate_size or 0
            total += 3 * hidden * width + hidden * config.num_moe_experts
        else:
            total += 3 * hidden * config.ffn_hidden_size
    return total


def test_the_estimate_counts_all_parameters(sizes):
    from nemo_dllm.recipes.memory import count_parameters

    for name, (_, _, facts, config) in sizes.items():
        assert count_parameters(config).total == facts.parameters, name


def test_parameters_as_published(sizes):
    for name, published in PUBLISHED.items():
        _, _, facts, config = sizes[name]
        # LLaMA 2 has no token to spare for the mask; its recipes have one row more in both tables.
        added = 2 * config.hidden_size if name.startswith("llama2_") else 0
        assert facts.parameters == published + added == count_parameters(config), name


@pytest.mark.usefixtures("single_process")
def test_the_built_models_have_as_many(family_recipes, sizes):
    """Without memory for any."""
    import fiddle as fdl
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in PUBLISHED:
        family, size, facts, _ = sizes[name]
        recipe = family_recipes.family_recipe(family, size, family.kinds[0], "pretrain", name="x")
        recipe.model.config.perform_initialization = False
        model = fdl.build(recipe.model)
        with FakeTensorMode():
            model.configure_model()
        assert sum(parameter.numel() for parameter in model.module.parameters()) == facts.parameters, name


def test_models_divide_over_their_layouts(all_recipes):
    for name, _, _, config, recipe in all_recipes:
        strategy = recipe.trainer.strategy
        tensor, pipeline = strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size
        for size in (config.num_attention_heads, config.num_query_groups, config.ffn_hidden_size):
            assert size % tensor == 0, name
        expert_ranks = strategy.expert_model_parallel_size * strategy.expert_tensor_parallel_size
        assert (config.num_moe_experts or 1) % strategy.expert_model_parallel_size == 0, name
        assert recipe.trainer.devices * recipe.trainer.num_nodes % (expert_ranks * pipeline) == 0, name
        # Experts exchange tokens in every layer: within a node.
        assert expert_ranks <= recipe.trainer.devices, name
        assert recipe.data.seq_length % (tensor * strategy.context_parallel_size) == 0, name
        assert config.num_layers % pipeline == 0, name
        assert tensor <= recipe.trainer.devices, name
        data_ranks = recipe.trainer.devices * recipe.trainer.num_nodes // (tensor * pipeline)
        assert recipe.data.global_batch_size % (recipe.data.micro_batch_size * data_ranks) == 0, name


def estimate(family_recipes, kind, facts, config, micro_batch_size):
    from nemo_dllm.recipes.memory import estimate_memory

    scored = micro_batch_size * family_recipes.SEQ_LENGTH
    positions = scored * family_recipes.KINDS[kind].positions_per_token
    return estimate_memory(config, facts.layout, positions, scored=scored)


def test_models_fit_their_gpus(family_recipes, all_recipes):
    for name, kind, facts, config, recipe in all_recipes:
        needed = estimate(family_recipes, kind, facts, config, recipe.data.micro_batch_size).total
        assert needed < GPU_BYTES - RESERVE_BYTES, (name, needed)


def row(family_recipes, name, family, size, facts, config):
    """A size's line in the table of the recipes' page."""
    layout = facts.layout
    gpus = layout.num_nodes * layout.gpus_per_node
    split = f"{layout.tensor} × {layout.pipeline} × {gpus // (layout.tensor * layout.pipeline)}"
    split += f", experts {layout.expert}" if layout.expert > 1 else ""
    needed = []
    for kind in ("mdlm", "bd3lm"):
        micro_batch_size = max(1, facts.micro_batch_size // family_recipes.KINDS[kind].positions_per_token)
        total = estimate(family_recipes, kind, facts, config, micro_batch_size).total
        needed.append(f"{total / 1e9:.0f} ({micro_batch_size})" if kind in family.kinds else "—")
    cells = (f"`{name}`", f"{facts.parameters / 1e9:.2f}", ", ".join(family.kinds), str(gpus), split, *needed)
    return f"| {' | '.join(cells)} |"


def test_the_page_has_every_size(family_recipes, sizes):
    rows = [row(family_recipes, name, *sizes[name]) for name in PUBLISHED]
    missing = [line for line in rows if line not in PAGE.read_text()]
    assert missing == [], "\n".join(missing)


def test_a_step_is_a_million_tokens(all_recipes):
    for name, _, _, _, recipe in all_recipes:
        assert recipe.data.global_batch_size * recipe.data.seq_length == 2**20, name
        assert recipe.data.num_val_rows % recipe.data.global_batch_size == 0, name
        assert recipe.data.seq_length == recipe.model.config.seq_length, name


def test_model_and_data_agree_on_the_vocabulary(all_recipes):
    for name, _, _, config, recipe in all_recipes:
        assert recipe.data.vocab_size == config.vocab_size, name
        assert recipe.data.mask_token_id == recipe.model.objective.mask_token_id < config.vocab_size, name


def test_what_the_recipes_of_a_size_differ_in(recipes):
    from nemo_dllm.collections.diffusion.models.a2d import A2DModel
    from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
    from nemo_dllm.recipes import tasks

    for kind, model, objective, micro_batch_size, pretrain_rate in (
        ("mdlm", MDLMModel, MaskedDiffusion, 8, 3e-4),
        ("a2d", A2DModel, MaskedDiffusion, 8, 1e-4),
        ("bd3lm", BD3LMModel, BlockDiffusion, 4, 3e-4),
    ):
        for task, run, rate in (("pretrain", tasks.pretrain, pretrain_rate), ("finetune", tasks.finetune, 2e-5)):
            recipe = recipes[f"qwen3_0p6b_{kind}_{task}"]
            assert recipe.__fn_or_cls__ is run
            assert recipe.model.__fn_or_cls__ is model
            assert recipe.model.objective.__fn_or_cls__ is objective
            assert recipe.data.micro_batch_size == micro_batch_size
            assert recipe.optim.config.lr == pytest.approx(rate)
    assert recipes["qwen3_0p6b_bd3lm_pretrain"].model.objective.block_size == 32


def test_adapters_of_every_family(all_recipes):
    import fiddle as fdl

    from nemo_dllm.collections.diffusion.models.lora import ATTENTION_LAYERS, LoRA

    adapted = {name: (config, recipe) for name, _, _, config, recipe in all_recipes if name.endswith("_lora")}
    assert 3 * len(adapted) == len(all_recipes)
    for name, (config, recipe) in adapted.items():
        lora = fdl.build(recipe.peft)
        assert type(lora) is LoRA, name
        assert (lora.dim, lora.alpha, lora.dropout) == (32, 64, 0.0), name
        linear = ATTENTION_LAYERS if config.num_moe_experts else [*ATTENTION_LAYERS, "linear_fc1", "linear_fc2"]
        assert lora.target_modules == linear, name
        lora.check_fits(config)
        assert recipe.optim.config.lr == pytest.approx(2e-4), name


def test_sdar_is_block_diffusion_in_blocks_of_four(recipes):
    from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel

    model = recipes["sdar_8b_pretrain"].model
    assert model.__fn_or_cls__ is BD3LMModel
    assert model.objective.block_size == 4
    assert "sdar_8b_mdlm_pretrain" not in recipes


def test_the_shift_is_the_family_s(recipes):
    assert recipes["dream_7b_pretrain"].model.objective.right_shift is True
    assert recipes["llada_8b_finetune"].model.objective.right_shift is False


def test_start_weights(family_recipes, recipes):
    from nemo_dllm.recipes.builder import RECIPES

    assert recipes["qwen3_8b_a2d_finetune"].init_from is None
    recipe = RECIPES["llama31_70b_mdlm_pretrain"](init_from="folder", name="mine")
    assert recipe.init_from == "folder"
    assert recipe.log.name == "mine"
    # To go on takes a third of the rate, for a third as long or less.
    assert recipe.optim.config.lr == pytest.approx(recipes["llama31_70b_mdlm_pretrain"].optim.config.lr / 3)
    assert recipe.trainer.max_steps == 20_000


def test_what_there_is_not(family_recipes, sizes):
    family = sizes["llada_8b"][0]
    for size, kind, task, error in (
        ("7b", "mdlm", "pretrain", "size='7b' of llada is unknown; choose from 8b"),
        ("8b", "a2d", "pretrain", "kind='a2d' of llada is unknown; choose from mdlm"),
        ("8b", "mdlm", "eval", "task='eval' of llada is unknown; choose from pretrain, finetune, lora"),
    ):
        with pytest.raises(ValueError, match=error):
            family_recipes.family_recipe(family, size, kind, task, name="x")
