"""Whether a model, its data and a layout of ranks go together, told before anything is built."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import lightning.pytorch as pl
from nemo.collections.llm.gpt.model.base import GPTConfig
from nemo.utils.get_rank import is_global_rank_zero

from nemo_dllm.collections.diffusion.objectives import Objective

_STRATEGY = "trainer.strategy."
_MODEL = "model.config."
_TENSOR = f"{_STRATEGY}tensor_model_parallel_size"
_PIPELINE = f"{_STRATEGY}pipeline_model_parallel_size"
_VIRTUAL = f"{_STRATEGY}virtual_pipeline_model_parallel_size"
_CONTEXT = f"{_STRATEGY}context_parallel_size"
_EXPERT = f"{_STRATEGY}expert_model_parallel_size"
_EXPERT_TENSOR = f"{_STRATEGY}expert_tensor_parallel_size"
_SEQUENCE = f"{_STRATEGY}sequence_parallel"
# Where one of these says how layers are dealt out, stages may differ.
_UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout")
_UNEVEN_FLAGS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


@dataclass(frozen=True)
class Degrees:
    """Over how many ranks a strategy spreads each part of a model."""

    tensor: int
    pipeline: int
    virtual: int
    """Model chunks of a pipeline stage."""
    context: int
    expert: int
    expert_tensor: int
    sequence: bool
    """Sequence parallelism, over the tensor-parallel ranks."""

    @classmethod
    def of(cls, strategy) -> "Degrees":
        """Those of NeMo's ``MegatronStrategy``."""
        parallelism = strategy.parallelism
        return cls(
            tensor=parallelism.tensor_model_parallel_size,
            pipeline=parallelism.pipeline_model_parallel_size,
            virtual=parallelism.virtual_pipeline_model_parallel_size or 1,
            context=parallelism.context_parallel_size,
            expert=parallelism.expert_model_parallel_size,
            expert_tensor=parallelism.expert_tensor_parallel_size or parallelism.tensor_model_parallel_size,
            sequence=parallelism.sequence_parallel,
        )


@contextmanager
def refused_once() -> Iterator[None]:
    """Let an error of the settings, which all ranks find, come from the first alone; the others exit with code 1."""
    try:
        yield
    except (ValueError, FileNotFoundError):
        if is_global_rank_zero():
            raise
        raise SystemExit(1) from None


def check_layout(config: GPTConfig, objective: Objective, trainer: pl.Trainer, data: pl.LightningDataModule) -> None:
    """Check the sizes of a layout against the ranks, the model and the data. A vocabulary is padded, so it always fits.

    Args:
        config: of the model.
        objective: of the model.
        trainer: with a ``MegatronStrategy``.
        data: with ``seq_length``, ``micro_batch_size`` and ``global_batch_size``.

    Raises:
        ValueError: names the fields, their values and the nearest ones that fit.
    """
    degrees = Degrees.of(trainer.strategy)
    world_size = trainer.num_devices * trainer.num_nodes
    _check_world(degrees, trainer.num_devices, trainer.num_nodes, bool(config.num_moe_experts))
    _check_heads_and_widths(config, degrees)
    _check_experts(config, degrees)
    _check_stages(config, degrees, trainer.strategy)
    _check_sequence(objective, degrees, data.seq_length)
    if degrees.virtual > 1:
        samples = data.micro_batch_size * (world_size // (degrees.tensor * degrees.pipeline * degrees.context))
        micro_batches = data.global_batch_size // samples
        if micro_batches % degrees.pipeline:
            nearest = max(round(micro_batches / degrees.pipeline), 1) * degrees.pipeline * samples
            raise ValueError(
                f"data.global_batch_size={data.global_batch_size} makes {micro_batches} micro-batches, which virtual "
                f"stages take in groups of {_PIPELINE}={degrees.pipeline}; set data.global_batch_size={nearest}"
            )


def _check_world(degrees: Degrees, devices: int, nodes: int, experts: bool) -> None:
    layouts = [("tensor x pipeline x context", (degrees.tensor, degrees.pipeline, degrees.context))]
    if experts:
        layouts.append(("expert tensor x expert x pipeline", (degrees.expert_tensor, degrees.expert, degrees.pipeline)))
    for names, sizes in layouts:
        product = sizes[0] * sizes[1] * sizes[2]
        if devices * nodes % product:
            fitting = (n for n in range(1, devices + product + 1) if n * nodes % product == 0)
            raise ValueError(
                f"trainer.devices x trainer.num_nodes = {devices} x {nodes} = {devices * nodes} is not divisible by "
                f"{names} parallel size = {' x '.join(map(str, sizes))} = {product}; change trainer.devices or the "
                f"sizes of trainer.strategy: the nearest is trainer.devices={_nearest(devices, fitting)}"
            )


def _check_heads_and_widths(config: GPTConfig, degrees: Degrees) -> None:
    heads, groups = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
    _check_divisible(f"{_MODEL}num_attention_heads", heads, f"{_MODEL}num_query_groups", groups)
    _check_divisible(f"{_MODEL}num_attention_heads", heads, _TENSOR, degrees.tensor)
    _check_divisible(f"{_MODEL}num_query_groups", groups, _TENSOR, degrees.tensor)
    _check_divisible(f"{_MODEL}ffn_hidden_size", config.ffn_hidden_size, _TENSOR, degrees.tensor)
    if degrees.sequence and degrees.tensor == 1:
        raise ValueError(f"{_SEQUENCE}=True needs {_TENSOR} above 1, which is 1; set {_SEQUENCE}=False")


def _check_experts(config: GPTConfig, degrees: Degrees) -> None:
    experts = config.num_moe_experts
    if not experts:
        if degrees.expert > 1:
            raise ValueError(f"{_EXPERT}={degrees.expert}, but the model has no experts; set {_EXPERT}=1")
        return
    _check_divisible(f"{_MODEL}num_moe_experts", experts, _EXPERT, degrees.expert)
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size
    _check_divisible(f"{_MODEL}moe_ffn_hidden_size", width, _EXPERT_TENSOR, degrees.expert_tensor)
    if degrees.tensor > 1 and not degrees.sequence:
        raise ValueError(
            f"{_TENSOR}={degrees.tensor} with experts needs {_SEQUENCE}=True, which is False; set it to True"
        )


def _check_stages(config: GPTConfig, degrees: Degrees, strategy) -> None:
    if degrees.virtual > 1 and degrees.pipeline == 1:
        raise ValueError(f"{_VIRTUAL}={degrees.virtual} needs {_PIPELINE} above 1, which is 1; set {_VIRTUAL}=None")
    parallelism = strategy.parallelism
    uneven = any(getattr(parallelism, field) is not None for field in _UNEVEN)
    if uneven or any(getattr(parallelism, field) for field in _UNEVEN_FLAGS):
        return
    layers = f"{_MODEL}num_layers"
    _check_divisible(layers, config.num_layers, _PIPELINE, degrees.pipeline)
    per_stage = config.num_layers // degrees.pipeline
    if per_stage % degrees.virtual:
        raise ValueError(
            f"{layers}={config.num_layers} over {_PIPELINE}={degrees.pipeline} makes {per_stage} layers a stage, not "
            f"divisible by {_VIRTUAL}={degrees.virtual}; set {_VIRTUAL}={_nearest_divisor(per_stage, degrees.virtual)}"
        )


def _check_sequence(objective: Objective, degrees: Degrees, seq_length: int) -> None:
    length = "data.seq_length"
    _check_divisible(length, seq_length, _CONTEXT, degrees.context)
    shard, block = seq_length // degrees.context, objective.block_size
    if block and degrees.context > 1 and shard % block:
        fitting = (n for n in range(1, seq_length + 1) if n == 1 or seq_length % (n * block) == 0)
        raise ValueError(
            f"{length}={seq_length} over {_CONTEXT}={degrees.context} makes shards of {shard} tokens, which cut a "
            f"block of model.objective.block_size={block}; set {_CONTEXT}={_nearest(degrees.context, fitting)}"
        )
    if not degrees.sequence:
        return
    if degrees.context == 1:
        _check_divisible(length, seq_length, _TENSOR, degrees.tensor)
    elif shard % degrees.tensor:
        fits = degrees.context * degrees.tensor
        raise ValueError(
            f"{length}={seq_length} is not divisible by {_CONTEXT} x {_TENSOR} = {degrees.context} x "
            f"{degrees.tensor} = {fits}; set {length}={max(round(seq_length / fits), 1) * fits}"
        )


def _check_divisible(whole: str, size: int, part: str, degree: int) -> None:
    if size % degree:
        raise ValueError(
            f"{whole}={size} is not divisible by {part}={degree}; set {part}={_nearest_divisor(size, degree)}"
        )


def _nearest_divisor(size: int, degree: int) -> int:
    return _nearest(degree, (divisor for divisor in range(1, size + 1) if size % divisor == 0))


def _nearest(value: int, fitting: Iterator[int]) -> int:
    """The smaller of two that are as near."""
    return min(fitting, key=lambda candidate: (abs(candidate - value), candidate))
