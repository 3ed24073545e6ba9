"""What all recipes have in common: how they are put together, named, edited and given a precision."""

import inspect

import pytest
import torch

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def builder():
    from nemo_dllm.recipes import builder

    return builder


def test_every_recipe_builds(recipes):
    import fiddle as fdl
    from nemo import lightning as nl

    from nemo_dllm.collections.diffusion.models.model import DiffusionModel

    for name, recipe in recipes.items():
        built = fdl.build(recipe).keywords
        assert isinstance(built["model"], DiffusionModel), name
        assert isinstance(built["trainer"], nl.Trainer), name
        assert built["optim"].config.lr == recipe.optim.config.lr, name
        assert built["trainer"].max_steps == recipe.trainer.max_steps > 0, name


def test_every_recipe_passes_its_own_checks(recipes):
    import fiddle as fdl

    from nemo_dllm.recipes.tasks import check_settings

    for _, recipe in recipes.items():
        built = fdl.build(recipe).keywords
        check_settings(built["model"], built["data"], built["trainer"])


def test_a_recipe_twice_is_the_same_recipe(recipes):
    for name, recipe in recipes.items():
        assert recipe == recipes[name]
        changed = recipes[name]
        changed.optim.config.lr *= 2
        assert recipe != changed


def test_edits_of_one_recipe_leave_the_next_alone(recipes):
    first = recipes["mdlm_tiny"]
    first.trainer.callbacks.clear()
    first.trainer.strategy.ddp.overlap_grad_reduce = True
    assert recipes["mdlm_tiny"].trainer.callbacks
    assert recipes["mdlm_tiny"].trainer.strategy.ddp.overlap_grad_reduce is False


def test_a_run_is_called_like_its_recipe(builder, recipes):
    for name, factory in builder.RECIPES.items():
        signature = inspect.signature(factory)
        assert factory.__name__ == name
        assert signature.parameters["name"].default == name
        assert "size" not in signature.parameters
        assert recipes[name].log.name == name
        assert factory(name="other", dir="folder").log.name == "other"
        assert factory(name="other", dir="folder").log.log_dir == "folder"


def test_a_recipe_belongs_to_the_command_of_its_task(builder, recipes):
    """``nemo llm pretrain`` finds those that pretrain, ``nemo llm finetune`` those that fine-tune."""
    from nemo.collections import llm
    from nemo_run.cli.api import list_factories
    from nemo_run.config import get_type_namespace

    from nemo_dllm.recipes import tasks

    for command, task in ((llm.pretrain, tasks.pretrain), (llm.finetune, tasks.finetune)):
        offered = {factory.__name__ for factory in list_factories(get_type_namespace(command))}
        assert offered & set(builder.RECIPES) == {
            name for name, recipe in recipes.items() if recipe.__fn_or_cls__ is task
        }


def test_unknown_fields_are_refused(tiny):
    with pytest.raises(AttributeError, match="No parameter named 'objectiv'.*objective"):
        tiny.model.objectiv = None
    with pytest.raises(AttributeError, match="No parameter named 'max_step'"):
        tiny.trainer.max_step = 1
    with pytest.raises(AttributeError, match="No parameter named 'modell'"):
        tiny.modell = None


PRECISIONS = {
    # name: (Lightning's, weights, autocast flags bf16 and fp16, fp8)
    "bf16": ("bf16-mixed", torch.bfloat16, (True, False), None),
    "fp16": ("16-mixed", torch.float16, (False, True), None),
    "fp32": ("32-true", torch.float32, (False, False), None),
    "fp8": ("bf16-mixed", torch.bfloat16, (True, False), "hybrid"),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_reaches_plugin_pipeline_and_optimizer(builder, tiny, precision):
    import fiddle as fdl

    name, dtype, flags, fp8 = PRECISIONS[precision]
    builder.set_precision(tiny, precision)
    trainer, optim = fdl.build(tiny.trainer), fdl.build(tiny.optim)
    settings = trainer.precision_plugin.dtype_config
    assert trainer.precision_plugin.precision == name
    assert (settings.bf16, settings.fp16) == flags == (optim.config.bf16, optim.config.fp16)
    assert settings.fp32 is (precision == "fp32")
    assert settings.params_dtype is settings.pipeline_dtype is trainer.strategy.pipeline_dtype is dtype
    assert settings.fp8 == fp8
    assert settings.grad_reduce_in_fp32 is True
    assert trainer.strategy.ddp_config.grad_reduce_in_fp32 is True


def test_every_precision_is_tested(builder):
    assert set(PRECISIONS) == set(builder.PRECISIONS)


def test_a_precision_can_be_changed_back(builder, recipes, tiny):
    builder.set_precision(tiny, "fp8")
    assert tiny != recipes["mdlm_tiny"]
    builder.set_precision(tiny, "fp32")
    assert tiny == recipes["mdlm_tiny"]


def test_unknown_precision(builder, tiny):
    with pytest.raises(ValueError, match="precision='int4' is unknown; choose from fp32, bf16, fp16, fp8"):
        builder.set_precision(tiny, "int4")


def test_sequence_parallelism_follows_tensor_parallelism(recipes):
    for name, recipe in recipes.items():
        strategy = recipe.trainer.strategy
        assert strategy.sequence_parallel is (strategy.tensor_model_parallel_size > 1), name


def test_learning_rate_ends_at_a_tenth(recipes):
    for name, recipe in recipes.items():
        schedule = recipe.optim.lr_scheduler
        assert schedule.min_lr == recipe.optim.config.lr / 10, name
        assert 0 < schedule.warmup_steps < recipe.trainer.max_steps, name


def test_checkpoints_of_the_best_and_the_last_validation(recipes):
    for name, recipe in recipes.items():
        checkpoints = recipe.log.ckpt
        assert (checkpoints.monitor, checkpoints.mode, checkpoints.save_top_k) == ("val_loss", "min", 1), name
        assert checkpoints.save_last is checkpoints.save_optim_on_train_end is True, name
        assert recipe.trainer.max_steps % recipe.trainer.val_check_interval == 0, name
        # Otherwise Lightning counts batches of the epoch.
        assert recipe.trainer.check_val_every_n_epoch is None, name
