"""The tasks that recipes run: NeMo's, after a check of the settings that belong to several objects at once."""

import difflib
import inspect
import math
from pathlib import Path

import lightning.pytorch as pl
from nemo import lightning as nl
from nemo.collections import llm
from nemo.lightning.pytorch.callbacks import PEFT
from nemo.lightning.pytorch.optim import OptimizerModule
from torch.nn.parallel import DistributedDataParallel

from nemo_dllm.cli.errors import refused_once
from nemo_dllm.collections.diffusion.attention.layers import have_transformer_engine
from nemo_dllm.collections.diffusion.data.batch_sizes import check_batch_sizes
from nemo_dllm.collections.diffusion.models.degrees import check_size
from nemo_dllm.collections.diffusion.models.fsdp import check_distributed_optimizer, is_fully_sharded
from nemo_dllm.collections.diffusion.models.layout import check_layout
from nemo_dllm.collections.diffusion.models.layout_options import check_layout_options
from nemo_dllm.collections.diffusion.models.lora import LoRA
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.objectives import Objective
from nemo_dllm.collections.diffusion.training.termination import interrupts_end_with_their_code
from nemo_dllm.recipes.cpu_memory import check_cpu_memory
from nemo_dllm.recipes.start import check_start, start_from

OPTIMIZERS = ("adam", "sgd")
MODEL_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("vocab_size", "num_moe_experts", "moe_ffn_hidden_size"),
)
OPTIONAL_SIZES = ("num_moe_experts", "moe_ffn_hidden_size")
"""None says that there are no experts, and that they are as wide as the MLP."""


def pretrain(
    model: DiffusionModel,
    data: pl.LightningDataModule,
    trainer: nl.Trainer,
    log: nl.NeMoLogger | None = None,
    resume: nl.AutoResume | None = None,
    optim: OptimizerModule | None = None,
    init_from: str | None = None,
    mask_init: str = "mean",
    recipe_mask_token_id: int | None = None,
) -> Path:
    """Pretrain a diffusion model; further arguments and result as ``nemo.collections.llm.pretrain``.

    Args:
        model, data, trainer, log, resume, optim: see there.
        init_from, mask_init, recipe_mask_token_id: what to start from, see :class:`StartFrom`; None is random weights.

    Raises:
        ValueError: where model, data and trainer do not fit together; names the fields, before anything is built.
        SystemExit: where it is told to end, see :class:`SaveOnTermination`.
    """
    with refused_once():
        check_start(init_from, log, resume)
        check_settings(model, data, trainer)
        check_cpu_memory(model, data, trainer)
        _check_optimizer(optim, trainer.strategy)
        start = {"mask_init": mask_init, "data": data, "recipe_mask_token_id": recipe_mask_token_id}
        resume = start_from(init_from, resume, **start)
    set_context(model, data.seq_length)
    with interrupts_end_with_their_code():
        return llm.pretrain(model=model, data=data, trainer=trainer, log=log, resume=resume, optim=optim)


def finetune(
    model: DiffusionModel,
    data: pl.LightningDataModule,
    trainer: nl.Trainer,
    log: nl.NeMoLogger | None = None,
    resume: nl.AutoResume | None = None,
    optim: OptimizerModule | None = None,
    peft: PEFT | None = None,
    init_from: str | None = None,
    mask_init: str = "mean",
    recipe_mask_token_id: int | None = None,
) -> Path:
    """Fine-tune a diffusion model; further arguments and result as ``nemo.collections.llm.finetune``.

    Args:
        model, data, trainer, log, resume, optim, peft: see there.
        init_from, mask_init, recipe_mask_token_id: see :func:`pretrain`.

    Raises:
        ValueError: as :func:`pretrain`, and for ``peft`` that cannot be trained or merged, or has nothing to adapt.
    """
    with refused_once():
        check_start(init_from, log, resume)
        check_settings(model, data, trainer)
        if peft is None:
            check_cpu_memory(model, data, trainer)
        _check_optimizer(optim, trainer.strategy)
        _check_adapters(peft, model, trainer.strategy, resume, init_from)
        start = {"mask_init": mask_init, "data": data, "recipe_mask_token_id": recipe_mask_token_id}
        resume = start_from(init_from, resume, **start, adapters=peft is not None)
    set_context(model, data.seq_length)
    with interrupts_end_with_their_code():
        return llm.finetune(
            model=model, data=data, trainer=trainer, log=log, resume=resume, optim=optim, peft=peft, tokenizer="data"
        )


def set_context(model: DiffusionModel, seq_length: int) -> None:
    """Make checkpoints say how long the samples were, which is the context that they are sampled and judged with.

    A table of learned positions keeps its rows.
    """
    if model.config.position_embedding_type != "learned_absolute":
        for config in (model.config, model.__io__.config):
            config.seq_length = seq_length


def check_settings(model: DiffusionModel, data: pl.LightningDataModule, trainer: nl.Trainer) -> None:
    """Check what no object can check alone.

    Raises:
        ValueError: names fields, values and a fix.
    """
    strategy, config = trainer.strategy, model.config
    _check_processes(trainer)
    _check_fields(strategy)
    _check_sizes("trainer", trainer, ("log_every_n_steps", "accumulate_grad_batches"))
    _check_sizes("model.config", config, MODEL_SIZES)
    degrees = check_layout(config, model.objective, trainer, data)
    check_layout_options(config, strategy, model.transformer_impl)
    check_batch_sizes(data.global_batch_size, data.micro_batch_size, trainer.world_size // degrees.model_ranks)
    _check_positions(config, data.seq_length)
    _check_rotary(config)
    _check_rows(model.objective, data, strategy)
    if trainer.max_steps < 1:
        raise ValueError(f"trainer.max_steps={trainer.max_steps} must be the number of optimizer steps, at least 1")
    if trainer.val_check_interval == 0:
        raise ValueError(
            "trainer.val_check_interval=0 must be the number of steps between validations; trainer.limit_val_batches=0 "
            "leaves them out"
        )
    if trainer.limit_train_batches != 1.0:
        raise ValueError(
            f"trainer.limit_train_batches={trainer.limit_train_batches} would feed the same samples again and again; "
            "set trainer.max_steps instead"
        )
    if getattr(getattr(trainer.precision_plugin, "dtype_config", None), "fp8", None):
        if not have_transformer_engine():
            raise ValueError("precision fp8 needs Transformer Engine, which is not installed; install the extra `te`")
        if model.transformer_impl == "local":
            raise ValueError(
                "precision fp8 needs Transformer Engine's layers, but model.transformer_impl='local'; "
                "set it to 'transformer_engine'"
            )


def _check_adapters(
    peft: PEFT | None,
    model: DiffusionModel,
    strategy: nl.MegatronStrategy,
    resume: nl.AutoResume | None,
    init_from: str | None,
) -> None:
    if peft is None:
        return
    if is_fully_sharded(strategy):
        raise ValueError(
            "peft trains few weights beside frozen ones, which trainer.strategy.fsdp='megatron' does not shard; "
            "set fsdp=None"
        )
    if isinstance(peft, LoRA):
        peft.check_fits(model.config)
    elif not have_transformer_engine():
        raise ValueError(
            f"peft={type(peft).__module__}.{type(peft).__name__} needs Transformer Engine's layers; take LoRA of "
            f"{LoRA.__module__}, or install the extra `te`"
        )
    if init_from is None and (resume is None or not (resume.restore_config or resume.resume_from_path)):
        raise ValueError(
            "peft adapts a trained model, and init_from is None, which is random weights; set init_from to a Hugging "
            "Face folder, a name on the Hub (hf://NAME) or a NeMo checkpoint"
        )


def _check_processes(trainer: nl.Trainer) -> None:
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if trainer.world_size != devices * nodes:
        raise ValueError(
            f"trainer.devices={devices} and trainer.num_nodes={nodes} ask for {devices * nodes} processes, "
            f"{trainer.world_size} have been started; set them to what torchrun or srun starts per node, and on nodes"
        )


def _check_fields(strategy: nl.MegatronStrategy) -> None:
    """Refuse what the strategy does not know; it hands any other field on to torch, which never looks at it."""
    for field in strategy._ddp_kwargs.keys() - inspect.signature(DistributedDataParallel).parameters.keys():
        known = inspect.signature(nl.MegatronStrategy).parameters
        similar = difflib.get_close_matches(field, known) or sorted(known)
        raise ValueError(f"trainer.strategy has no field {field}; did you mean {' or '.join(similar)}?")


def _check_sizes(place: str, owner: object, names: tuple[str, ...]) -> None:
    for name in names:
        size = getattr(owner, name)
        if size is not None:
            check_size(f"{place}.{name}", size, or_none=name in OPTIONAL_SIZES)


def _check_optimizer(optim: OptimizerModule | None, strategy: nl.MegatronStrategy) -> None:
    """Check what Megatron refuses late."""
    config = getattr(optim, "config", None)
    optimizer, rate = getattr(config, "optimizer", "adam"), getattr(config, "lr", None)
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optim.config.optimizer={optimizer!r} is unknown; choose from {', '.join(OPTIMIZERS)}")
    if is_fully_sharded(strategy):
        check_distributed_optimizer(getattr(config, "use_distributed_optimizer", True))
    if rate is not None and not 0 <= rate < math.inf:
        raise ValueError(f"optim.config.lr={rate} must be at least 0 and finite")
    warmup = getattr(getattr(optim, "lr_scheduler", None), "warmup_steps", None)
    if warmup is not None and warmup < 0:
        raise ValueError(f"optim.lr_scheduler.warmup_steps={warmup} must be at least 0")


def _check_positions(config, seq_length: int) -> None:
    # Learned positions are a table of this many rows; others are limited where the config says so.
    field = "seq_length" if config.position_embedding_type == "learned_absolute" else "max_position_embeddings"
    limit = getattr(config, field, None)
    if limit is not None and seq_length > limit:
        raise ValueError(
            f"data.seq_length={seq_length} is longer than the model's positions, model.config.{field}={limit}; "
            "choose a shorter sequence"
        )


def _check_rows(objective: Objective, data: pl.LightningDataModule, strategy: nl.MegatronStrategy) -> None:
    """Check what rows of other lengths than ``data.seq_length``, and several samples in a row, ask of the layout."""
    multiple = getattr(data, "pad_to_multiple_of", None)
    tensor, pipeline = strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size
    if multiple is not None and pipeline > 1:
        raise ValueError(
            f"data.pad_to_multiple_of={multiple} makes rows of different lengths, which the "
            f"trainer.strategy.pipeline_model_parallel_size={pipeline} stages cannot exchange; set it to None"
        )
    if multiple is not None and strategy.sequence_parallel and multiple % tensor:
        raise ValueError(
            f"data.pad_to_multiple_of={multiple} is not divisible by trainer.strategy.tensor_model_parallel_size="
            f"{tensor}, into which sequence parallelism cuts rows; choose a multiple of it"
        )
    block = objective.block_size
    if block is not None and getattr(data, "packing", False) and (data.block_size or 1) % block:
        raise ValueError(
            f"data.packing=True puts samples side by side in a row, and with data.block_size={data.block_size} they do "
            f"not end where blocks of model.objective.block_size={block} do; set data.block_size={block}"
        )


def _check_rotary(config) -> None:
    if config.position_embedding_type == "rope" and config.kv_channels % 2:
        raise ValueError(f"model.config.kv_channels={config.kv_channels} must be even: rotary embeddings turn pairs")
