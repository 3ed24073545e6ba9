"""Every recipe as its factory returns it."""

import pytest


@pytest.fixture(scope="session")
def recipes():
    """A new recipe of each name; edits stay with the test."""
    import nemo_dllm.recipes  # noqa: F401
    from nemo_dllm.recipes.builder import RECIPES

    class NewRecipes(dict):
        def __missing__(self, name):
            return RECIPES[name]()

        def items(self):
            return ((name, self[name]) for name in RECIPES)

    return NewRecipes()


@pytest.fixture
def tiny(recipes):
    """The smallest recipe, free to edit."""
    return recipes["mdlm_tiny"]
