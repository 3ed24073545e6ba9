"""Which recipes train a model of a checkpoint's sizes, for one that was started with another's."""

from collections.abc import Mapping
from typing import Any

import fiddle as fdl
import nemo_run as run

from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.connectors.families.registry import family_of, find_family
from nemo_dllm.connectors.load import OtherModelError
from nemo_dllm.recipes.builder import RECIPES


def way_out(error: OtherModelError, model_class: type[DiffusionModel]) -> str:
    """What to do about a checkpoint of another model: recipes of its sizes, or the fields that it needs.

    Args:
        error: that it is another one.
        model_class: of the recipe that does not fit, such as ``MDLMModel``.
    """
    names = fitting_recipes(error.hf_config, model_class)
    if names:
        return f"recipes of its sizes: {', '.join(names)}"
    if error.settings:
        fields = " ".join(f"model.config.{name}={value}" for name, value in error.settings.items())
        return f"no recipe has its sizes: set {fields}"
    return f"no recipe has its sizes: take one of family {find_family(error.hf_config).name} and set them"


def fitting_recipes(hf_config: Mapping[str, Any], model_class: type[DiffusionModel]) -> list[str]:
    """Names of the recipes for a class of model whose configuration describes a checkpoint, whatever its vocabulary.

    Args:
        hf_config: content of the checkpoint's config.json.
        model_class: such as ``MDLMModel``.
    """
    recipes = ((name, recipe()) for name, recipe in RECIPES.items())
    return [
        name
        for name, recipe in recipes
        if fdl.get_callable(recipe.model) is model_class and _describes(recipe.model.config, hf_config)
    ]


def _describes(config: run.Config, hf_config: Mapping[str, Any]) -> bool:
    family, config = find_family(hf_config), fdl.build(config)
    try:
        own = family_of(config)
    except ValueError:  # Of a recipe whose sizes are no family's.
        return False
    # A recipe has the vocabulary of its checkpoint, or one token more.
    return own is family and set(family.config.differences(config, hf_config)) <= {"vocab_size"}
