"""The one place where a recipe is put together."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import nemo_run as run
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule

from nemo_dllm.collections.diffusion.training.checkpoints import CommonModelCheckpoint
from nemo_dllm.collections.diffusion.training.expert_load import ExpertLoad
from nemo_dllm.collections.diffusion.training.loss_scale import LossScale
from nemo_dllm.collections.diffusion.training.metrics import DiffusionMetrics
from nemo_dllm.collections.diffusion.training.progress import RunProgress
from nemo_dllm.collections.diffusion.training.resume import ResumedCounters, ResumedTokens, ResumeLatest
from nemo_dllm.collections.diffusion.training.termination import SaveOnTermination

_HALF = {"autocast_enabled": False, "grad_reduce_in_fp32": True}
PRECISIONS = {
    "fp32": {"precision": "32", "params_dtype": torch.float32, "pipeline_dtype": torch.float32},
    "bf16": {"precision": "bf16-mixed", "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, **_HALF},
    "fp16": {"precision": "16-mixed", "params_dtype": torch.float16, "pipeline_dtype": torch.float16, **_HALF},
    "fp8": {
        "precision": "bf16-mixed",
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        **_HALF,
    },
}


RECIPES: dict[str, Callable[..., run.Partial]] = {}
"""Every recipe by the name that ``--factory`` takes."""


# Residual addition and the activations of experts fused by torch (dense SwiGLU has a kernel of its own); the CPU
# runtime switches both off. Rotation has a kernel of its own too, and LLaMA's default would ask for Transformer Engine.
FUSIONS = {"bias_activation_fusion": True, "bias_dropout_fusion": True, "apply_rope_fusion": False}


CALLBACKS = (DiffusionMetrics, ExpertLoad, RunProgress, ResumedTokens, ResumedCounters, LossScale, SaveOnTermination)


GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Layout:
    """Where a model runs: sizes are numbers of GPUs unless they say otherwise."""

    num_nodes: int = 1
    gpus_per_node: int = GPUS_PER_NODE
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Over which the experts of a layer are dealt out; among these GPUs, the data are split all the same."""
    expert_tensor: int = 1
    """Over which each expert is cut."""
    context: int = 1
    """Over which the tokens of each sample are dealt out."""
    virtual: int = 1
    """Model chunks of a pipeline stage."""
    sequence: bool = True
    """Whether tensor-parallel GPUs, if there are any, divide the tokens too where they do not divide the units."""
    fully_sharded: bool = False
    """Megatron-FSDP: GPUs that see different data share out weights and gradients, not the optimizer's state alone."""

    @property
    def gpus(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def model_gpus(self) -> int:
        """That hold a copy of the model together."""
        return self.tensor * self.pipeline * self.context


def layout_of_strategy(fields: Mapping[str, object], gpus: int, largest_node: int = GPUS_PER_NODE) -> Layout:
    """The layout that fields of a ``MegatronStrategy`` make of a number of GPUs.

    Args:
        fields: as ``{"context_parallel_size": 2, "fsdp": "megatron"}``; those left out have NeMo's defaults.
        gpus, largest_node: see :func:`nodes_of`.
    """
    tensor = fields.get("tensor_model_parallel_size", 1)
    return Layout(
        *nodes_of(gpus, largest_node),
        tensor=tensor,
        pipeline=fields.get("pipeline_model_parallel_size", 1),
        expert=fields.get("expert_model_parallel_size", 1),
        expert_tensor=fields.get("expert_tensor_parallel_size") or tensor,
        context=fields.get("context_parallel_size", 1),
        virtual=fields.get("virtual_pipeline_model_parallel_size") or 1,
        sequence=tensor == 1 or bool(fields.get("sequence_parallel")),
        fully_sharded=fields.get("fsdp") == "megatron",
    )


def nodes_of(gpus: int, largest_node: int = GPUS_PER_NODE) -> tuple[int, int]:
    """Nodes, and GPUs of each: as many as divide them, up to ``largest_node``."""
    per_node = next(size for size in range(largest_node, 0, -1) if gpus % size == 0)
    return gpus // per_node, per_node


def strategy_fields(layout: Layout) -> dict[str, object]:
    """The fields of a ``MegatronStrategy`` that make a layout."""
    return {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence and layout.tensor > 1,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "fsdp": "megatron" if layout.fully_sharded else None,
    }


@dataclass(frozen=True)
class Schedule:
    """How long and how fast a model learns."""

    max_steps: int
    """Optimizer steps."""
    learning_rate: float
    """At the end of the warm-up; it then falls to a tenth along a cosine."""
    warmup_steps: int
    validation_interval: int
    """Optimizer steps from one validation, and one checkpoint, to the next."""
    log_interval: int = 10
    """Optimizer steps from one line of metrics to the next."""
    weight_decay: float = 0.1


def diffusion_recipe(
    task: Callable,
    *,
    model: run.Config,
    data: run.Config,
    schedule: Schedule,
    name: str,
    layout: Layout = Layout(),
    precision: str = "bf16",
    dir: str | None = None,
) -> run.Partial:
    """Put a complete recipe together: trainer, strategy, data, optimizer, log and resume.

    Args:
        task: ``pretrain`` or ``finetune`` of ``nemo_dllm.recipes.tasks``.
        model: configuration of a diffusion model class.
        data: configuration of a data module.
        schedule: length and pace.
        name: of the run; names its folder.
        layout: GPUs and how the model is spread over them.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp8`` (needs Transformer Engine).
        dir: folder of the run's folder; None is ``nemo_experiments`` in the current one.

    Returns:
        The recipe; edit any field before it runs.

    Raises:
        ValueError: for an unknown precision.
    """
    recipe = run.Partial(
        task,
        model=model,
        trainer=_trainer(layout, schedule),
        data=data,
        log=_log(name, dir),
        optim=_optimizer(schedule),
        resume=run.Config(ResumeLatest),
    )
    set_precision(recipe, precision)
    return recipe


def set_precision(recipe: run.Partial, precision: str) -> None:
    """Set every field of a recipe that depends on its precision.

    Raises:
        ValueError: for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; choose from {', '.join(PRECISIONS)}")
    settings = PRECISIONS[precision]
    recipe.trainer.plugins = run.Config(nl.MegatronMixedPrecision, **settings)
    recipe.trainer.strategy.pipeline_dtype = settings["pipeline_dtype"]
    recipe.optim.config.bf16 = settings["precision"] == "bf16-mixed"
    recipe.optim.config.fp16 = settings["precision"] == "16-mixed"


def _trainer(layout: Layout, schedule: Schedule) -> run.Config:
    strategy = run.Config(
        nl.MegatronStrategy,
        **strategy_fields(layout),
        ckpt_async_save=False,
        # Else a run could go on in its own tensor- and pipeline-parallel layout only.
        ckpt_optim_fully_reshardable=True,
        replace_progress_bar=False,
        ddp=run.Config(
            DistributedDataParallelConfig,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=layout.gpus > 1,
            overlap_param_gather=layout.gpus > 1,
            check_for_nan_in_grad=False,
        ),
    )
    return run.Config(
        nl.Trainer,
        accelerator="auto",
        num_nodes=layout.num_nodes,
        devices=layout.gpus_per_node,
        strategy=strategy,
        callbacks=[run.Config(callback) for callback in CALLBACKS],
        max_steps=schedule.max_steps,
        val_check_interval=schedule.validation_interval,
        check_val_every_n_epoch=None,
        limit_val_batches=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=schedule.log_interval,
        use_distributed_sampler=False,
        enable_model_summary=False,
    )


def _optimizer(schedule: Schedule) -> run.Config:
    return run.Config(
        MegatronOptimizerModule,
        config=run.Config(
            OptimizerConfig,
            optimizer="adam",
            lr=schedule.learning_rate,
            weight_decay=schedule.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            clip_grad=1.0,
            use_distributed_optimizer=True,
        ),
        lr_scheduler=run.Config(
            CosineAnnealingScheduler,
            warmup_steps=schedule.warmup_steps,
            constant_steps=0,
            min_lr=schedule.learning_rate / 10,
        ),
    )


def _log(name: str, dir: str | None) -> run.Config:
    return run.Config(
        nl.NeMoLogger,
        # Saves after each validation: the best one by its loss, and the last.
        name=name,
        log_dir=dir,
        use_datetime_version=False,
        ckpt=run.Config(
            CommonModelCheckpoint,
            monitor="val_loss",
            mode="min",
            save_top_k=1,
            save_last=True,
            save_optim_on_train_end=True,
        ),
        tensorboard=run.Config(TensorBoardLogger, save_dir=name, name="tensorboard"),
    )


def register(recipe: Callable[..., run.Partial], *, target: Callable, name: str) -> None:
    """Offer a recipe to the ``nemo`` command.

    Args:
        recipe: function that returns a recipe.
        target: the command: ``nemo.collections.llm.pretrain`` or ``finetune``.
        name: what ``--factory`` calls it; also the default name of its runs.
    """
    signature = inspect.signature(recipe)
    parameters = [
        parameter.replace(default=name) if key == "name" else parameter
        for key, parameter in signature.parameters.items()
    ]

    def factory(**arguments):
        return recipe(**{"name": name, **arguments})

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = recipe.__doc__
    factory.__signature__ = signature.replace(parameters=parameters)
    RECIPES[name] = run.cli.factory(target=target, name=name)(factory)
