"""Qwen3 as masked diffusion models: from random weights (``mdlm``) and from autoregressive ones (``a2d``)."""

from dataclasses import dataclass, replace

import nemo_run as run
from nemo import lightning as nl
from nemo.collections import llm

from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
from nemo_dllm.collections.diffusion.models.a2d import A2DModel
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
from nemo_dllm.recipes.builder import FUSIONS, Layout, Schedule, diffusion_recipe, register
from nemo_dllm.recipes.tasks import finetune, pretrain

VOCAB_SIZE = 151936
# The id that the next added token gets; inside the padded vocabulary, so the table does not grow.
MASK_TOKEN_ID = 151669


@dataclass(frozen=True)
class Size:
    """What differs between the sizes of the family."""

    config: type
    parameters: int
    """Published number of parameters, the tied head counted once."""
    layout: Layout
    """For GPUs of 80 GB, sequences of 4,096 tokens, fp32 gradients and optimizer state."""
    micro_batch_size: int


SIZES = {
    "0p6b": Size(llm.Qwen3Config600M, 596_049_920, Layout(), micro_batch_size=8),
    "1p7b": Size(llm.Qwen3Config1P7B, 1_720_574_976, Layout(), micro_batch_size=4),
    "4b": Size(llm.Qwen3Config4B, 4_022_468_096, Layout(tensor=2), micro_batch_size=4),
    "8b": Size(llm.Qwen3Config8B, 8_190_735_360, Layout(tensor=4), micro_batch_size=2),
    "14b": Size(llm.Qwen3Config14B, 14_768_307_200, Layout(tensor=8), micro_batch_size=2),
    "32b": Size(llm.Qwen3Config32B, 32_762_123_264, Layout(num_nodes=4, tensor=8, pipeline=2), micro_batch_size=1),
}

PRETRAIN = Schedule(max_steps=100_000, learning_rate=3e-4, warmup_steps=2_000, validation_interval=1_000)
CONTINUE = replace(PRETRAIN, max_steps=20_000, learning_rate=1e-4, warmup_steps=500)
FINETUNE = Schedule(max_steps=2_000, learning_rate=2e-5, warmup_steps=100, validation_interval=200)


def mdlm_pretrain(size: str, dir: str | None = None, name: str = "qwen3_mdlm_pretrain") -> run.Partial:
    """Pretrain from random weights.

    Args:
        size: a key of ``SIZES``.
        dir: folder of the run's folder.
        name: of the run.
    """
    return _recipe(size, MDLMModel, pretrain, PRETRAIN, dir, name)


def mdlm_finetune(
    size: str, dir: str | None = None, name: str = "qwen3_mdlm_finetune", init_from: str | None = None
) -> run.Partial:
    """Fine-tune all weights of a masked diffusion model.

    Args:
        size, dir, name: see :func:`mdlm_pretrain`.
        init_from: folder of the NeMo checkpoint to start from.
    """
    return _recipe(size, MDLMModel, finetune, FINETUNE, dir, name, init_from)


def a2d_pretrain(
    size: str, dir: str | None = None, name: str = "qwen3_a2d_pretrain", init_from: str | None = None
) -> run.Partial:
    """Turn an autoregressive Qwen3 into a masked diffusion model by further pretraining.

    Args:
        size, dir, name: see :func:`mdlm_pretrain`.
        init_from: folder of the NeMo checkpoint that ``nemo llm import`` made of the Hugging Face one.
    """
    return _recipe(size, A2DModel, pretrain, CONTINUE, dir, name, init_from)


def a2d_finetune(
    size: str, dir: str | None = None, name: str = "qwen3_a2d_finetune", init_from: str | None = None
) -> run.Partial:
    """Turn an autoregressive Qwen3 into a masked diffusion model on task data, all weights trained.

    Args:
        size, dir, name, init_from: see :func:`a2d_pretrain`.
    """
    return _recipe(size, A2DModel, finetune, FINETUNE, dir, name, init_from)


def _recipe(size, model_class, task, schedule, dir, name, init_from=None) -> run.Partial:
    if size not in SIZES:
        raise ValueError(f"size={size!r} is unknown; choose from {', '.join(SIZES)}")
    facts = SIZES[size]
    recipe = diffusion_recipe(
        task,
        model=run.Config(
            model_class,
            config=run.Config(facts.config, seq_length=4096, **FUSIONS),
            objective=run.Config(MaskedDiffusion, mask_token_id=MASK_TOKEN_ID),
        ),
        data=run.Config(
            MockDataModule,
            vocab_size=VOCAB_SIZE,
            mask_token_id=MASK_TOKEN_ID,
            seq_length=4096,
            micro_batch_size=facts.micro_batch_size,
            global_batch_size=256,
            num_val_rows=256,
        ),
        schedule=schedule,
        name=name,
        layout=facts.layout,
        dir=dir,
    )
    if init_from is not None:
        recipe.resume.restore_config = run.Config(nl.RestoreConfig, path=init_from)
    return recipe


for _size in SIZES:
    for _recipe_of_size, _target in (
        (mdlm_pretrain, llm.pretrain),
        (mdlm_finetune, llm.finetune),
        (a2d_pretrain, llm.pretrain),
        (a2d_finetune, llm.finetune),
    ):
        register(_recipe_of_size, target=_target, name=f"qwen3_{_size}_{_recipe_of_size.__name__}", size=_size)
