"""What to do about a checkpoint of other sizes than a recipe's."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

MODELS = Path(__file__).parents[1] / "golden" / "models"


def hf_config_of(recipe, **changes):
    """The config.json of a recipe's model."""
    import fiddle as fdl

    from nemo_dllm.connectors.families.registry import family_of

    config = fdl.build(recipe.model.config)
    family = family_of(config)
    first = family.hf_classes[0]
    told = {"model_type": first.model_type, "architectures": [first.architecture]}
    return family.config.to_hf(config) | told | changes


@pytest.fixture(scope="module")
def told():
    """What ``way_out`` says to a recipe that is started from a checkpoint."""
    import fiddle as fdl

    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.connectors.load import OtherModelError, check_fits_config
    from nemo_dllm.recipes.fitting import way_out

    def told(recipe, hf_config):
        with pytest.raises(OtherModelError) as found:
            check_fits_config(fdl.build(recipe.model.config), hf_config, Path("here"))
        return way_out(found.value, fdl.get_callable(recipe.model))

    return told


def test_recipes_of_the_checkpoints_sizes_are_named(told, recipes):
    small, large = recipes["qwen3_0p6b_a2d_finetune"], recipes["qwen3_1p7b_a2d_finetune"]
    expected = "recipes of its sizes: " + ", ".join(
        f"qwen3_1p7b_a2d_{task}" for task in ("pretrain", "finetune", "lora")
    )
    assert told(small, hf_config_of(large)) == expected
    # The token that a mask adds does not make it another size.
    assert told(small, hf_config_of(large, vocab_size=151_937)) == expected
    assert told(recipes["qwen3_1p7b_mdlm_lora"], hf_config_of(small)).startswith(
        "recipes of its sizes: qwen3_0p6b_mdlm"
    )


def test_a_recipe_of_another_family(told, recipes):
    of_llama = hf_config_of(recipes["llama32_1b_a2d_finetune"])
    assert "llama32_1b_a2d_finetune" in told(recipes["qwen3_0p6b_a2d_finetune"], of_llama)


def test_without_a_recipe_the_fields_are_named(told, recipes):
    config = json.loads((MODELS / "qwen3" / "config.json").read_text())
    said = told(recipes["qwen3_0p6b_a2d_finetune"], config)
    assert said.startswith("no recipe has its sizes: set model.config.num_layers=3 model.config.hidden_size=64 ")
    config = json.loads((MODELS / "llama" / "config.json").read_text())
    assert told(recipes["qwen3_0p6b_a2d_finetune"], config).endswith("take one of family llama and set them")
