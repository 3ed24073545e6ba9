"""Whether the layers of a model can be dealt out over the stages of a pipeline."""

from collections.abc import Iterable, Sequence

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from nemo.collections.llm.gpt.model.base import GPTConfig

from nemo_dllm.collections.diffusion.models.degrees import (
    MODEL,
    PIPELINE,
    STRATEGY,
    VIRTUAL,
    Degrees,
    check_divisible,
    check_size,
    nearest_divisor,
    nearest_of,
)

# Stages may have layers of their own number, or embedding and loss stand for a layer each.
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED_AS_LAYERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_LAYOUT = "pipeline_model_parallel_layout"


def check_stages(config: GPTConfig, degrees: Degrees, ranks: int, strategy) -> None:
    """Check the ways in which a strategy may deal out layers.

    Args:
        config: of the model.
        degrees: of the strategy.
        ranks: of all models.
        strategy: NeMo's ``MegatronStrategy``.

    Raises:
        ValueError: names the fields, their values and the nearest ones that fit.
    """
    parallelism = strategy.parallelism
    ends = {name: size for name in _ENDS if (size := getattr(parallelism, name)) is not None}
    counted = [name for name in _COUNTED_AS_LAYERS if getattr(parallelism, name)]
    layout = getattr(parallelism, _LAYOUT)
    ways = [*ends, *counted, *([_LAYOUT] if layout is not None else [])]
    if layout is not None and len(ways) > 1 or ends and counted:
        raise ValueError(
            f"{' and '.join(STRATEGY + name for name in ways)} deal out layers, each in its way; leave all but one out"
        )
    _check_chunks(degrees)
    if layout is not None:
        _check_dealt_out(config, degrees, layout)
    elif ends:
        _check_ends(config, degrees, ends)
    else:
        check_even_stages(config, degrees, ranks, counted)


def _check_chunks(degrees: Degrees) -> None:
    if degrees.virtual > 1 and degrees.pipeline == 1:
        raise ValueError(f"{VIRTUAL}={degrees.virtual} needs {PIPELINE} above 1, which is 1; set {VIRTUAL}=None")


def _check_dealt_out(config: GPTConfig, degrees: Degrees, layout: object) -> None:
    try:
        if isinstance(layout, str):
            layout = PipelineParallelLayerLayout.from_str(layout, degrees.pipeline)
        elif isinstance(layout, list):
            layout = PipelineParallelLayerLayout(layout, degrees.pipeline)
        elif not isinstance(layout, PipelineParallelLayerLayout):
            raise ValueError("it is neither a text nor a list of stages")
        layout.validate_layer_layout(config.num_layers, None)
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f"{STRATEGY}{_LAYOUT}={layout} does not deal out {MODEL}num_layers={config.num_layers} over "
            f"{PIPELINE}={degrees.pipeline} ({str(error).rstrip('.')}); change it, or set it to None"
        ) from error
    if layout.virtual_pipeline_model_parallel_size != degrees.virtual:
        # Ranks would wait for each other.
        chunks = layout.virtual_pipeline_model_parallel_size
        raise ValueError(
            f"{STRATEGY}{_LAYOUT} deals out {chunks} chunks for each stage of {PIPELINE}={degrees.pipeline}, "
            f"{VIRTUAL}={degrees.virtual if degrees.virtual > 1 else None}; set it to {chunks if chunks > 1 else None}"
        )


def _check_ends(config: GPTConfig, degrees: Degrees, ends: dict[str, int]) -> None:
    """The first and the last stage may have numbers of layers of their own; those between them have as many each."""
    for name, size in ends.items():
        check_size(STRATEGY + name, size, or_none=True)

    def fits(sizes: Iterable[int]) -> bool:
        left, between = config.num_layers - sum(sizes), degrees.pipeline - len(ends)
        if any(size % degrees.virtual for size in sizes):
            return False
        if between <= 0:
            return left == between == 0
        return left > 0 and left % (between * degrees.virtual) == 0

    if fits(ends.values()):
        return
    name, size = next(iter(ends.items()))
    others = list(ends.values())[1:]
    fitting = [number for number in range(1, config.num_layers + 1) if fits([number, *others])]
    nearest = f"{STRATEGY}{name}={nearest_of(size, iter(fitting))}" if fitting else f"{' and '.join(ends)} to None"
    stages = f"{PIPELINE}={degrees.pipeline}" + (f" of {degrees.virtual} chunks each" if degrees.virtual > 1 else "")
    raise ValueError(
        f"{' and '.join(f'{STRATEGY}{name}={size}' for name, size in ends.items())} leave no equal numbers of "
        f"{MODEL}num_layers={config.num_layers} for the other stages of {stages}; set {nearest}"
    )


def check_even_stages(config: GPTConfig, degrees: Degrees, ranks: int, counted: Sequence[str] = ()) -> None:
    """Check that every stage, and every chunk of it, gets as many layers as the others.

    Args:
        config: of the model.
        degrees: that divide the ranks.
        ranks: of all models.
        counted: fields of the strategy by which embedding or loss stand for a layer.

    Raises:
        ValueError: names the fields, their values and the nearest ones that fit.
    """
    _check_chunks(degrees)
    layers, number = f"{MODEL}num_layers", config.num_layers + len(counted)
    if counted:
        layers = f"{layers} (with {' and '.join(counted)})"
    chunks = [number // degrees.virtual] if number % degrees.virtual == 0 else []
    left = [ranks // (degrees.tensor * degrees.context)]
    if config.num_moe_experts:
        left.append(ranks // (degrees.expert_tensor * degrees.expert))
    check_divisible(layers, number, PIPELINE, degrees.pipeline, all_of=[number, *chunks, *left])
    per_stage = number // degrees.pipeline
    if per_stage % degrees.virtual:
        nearest = nearest_divisor(per_stage, degrees.virtual)
        raise ValueError(
            f"{layers}={number} over {PIPELINE}={degrees.pipeline} makes {per_stage} layers a stage, not "
            f"divisible by {VIRTUAL}={degrees.virtual}; set {VIRTUAL}={nearest if nearest > 1 else None}"
        )
