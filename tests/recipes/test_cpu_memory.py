"""Runs that no machine without a GPU could hold."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.nemo

# Qwen3-0.6B.
PARAMETERS = 596_049_920


@pytest.fixture
def check(monkeypatch):
    """Checks a recipe of eight processes, or of ``devices``, on a machine of so many bytes."""
    import fiddle as fdl
    import psutil

    from nemo_dllm.recipes.builder import RECIPES
    from nemo_dllm.recipes.cpu_memory import check_cpu_memory

    def run(total, devices=8, **strategy):
        recipe = RECIPES["qwen3_0p6b_mdlm_pretrain"]()
        recipe.trainer.accelerator, recipe.trainer.devices = "cpu", devices
        for field, value in strategy.items():
            setattr(recipe.trainer.strategy, field, value)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
        built = fdl.build(recipe).keywords
        check_cpu_memory(built["model"], built["data"], built["trainer"])

    return run


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_what_the_state_of_a_run_takes(check, devices):
    # Each process has weights and gradients, all together one optimizer.
    needed = (devices * (2 + 4) + 12) * PARAMETERS
    check(needed + 1, devices)
    with pytest.raises(ValueError, match=f"trainer.devices={devices} need at least {needed / 1e9:.0f} GB of memory"):
        check(needed - 1, devices)


def test_tensor_parallel_processes_share_more(check):
    # Four copies; norms are in each process.
    needed = (4 * (2 + 4) + 12) * PARAMETERS
    check(1.01 * needed, 8, tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match="of memory"):
        check(0.99 * needed, 8, tensor_model_parallel_size=2, sequence_parallel=True)


def test_the_fix_is_named(check):
    with pytest.raises(
        ValueError, match="this machine has 9; set trainer.devices=1, or take a smaller recipe, such as"
    ):
        check(8 << 30)
