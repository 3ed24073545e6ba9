"""A family's recipes from a table of its sizes: every kind of model, pretrained and fine-tuned.

Files of families hold a :class:`RecipeFamily` and one call of :func:`register_family`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import nemo_run as run

from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
from nemo_dllm.collections.diffusion.models.a2d import A2DModel
from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
from nemo_dllm.recipes.builder import FUSIONS, Layout, Schedule, diffusion_recipe, register
from nemo_dllm.recipes.datasets import check_tokenizer, pretraining_data, supervised_data
from nemo_dllm.recipes.family_tasks import TASKS, set_adapters

SEQ_LENGTH = 4096
GLOBAL_BATCH_SIZE = 256
PRETRAIN = Schedule(max_steps=100_000, learning_rate=3e-4, warmup_steps=2_000, validation_interval=1_000)
CONTINUE = Schedule(max_steps=20_000, learning_rate=1e-4, warmup_steps=500, validation_interval=1_000)


@dataclass(frozen=True)
class Size:
    """What differs between the sizes of a family."""

    config: type
    """NeMo's configuration."""
    parameters: int
    """Of the recipe's model, a tied head counted once."""
    layout: Layout
    """For GPUs of 80 GB: see ``recipes/memory.py``."""
    micro_batch_size: int
    """Sequences; models that read them twice take half."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Fields in which the recipe's configuration differs from the class's defaults."""
    learning_rate: float = PRETRAIN.learning_rate
    """Of pretraining from random weights; to go on from given ones takes a third."""

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return self.fields.get("vocab_size", self.config.vocab_size)


@dataclass(frozen=True)
class Kind:
    """A kind of diffusion model."""

    model: type
    objective: type
    adopts: bool
    """Whether it begins as an autoregressive model."""
    purpose: str
    """What its recipes train, for their descriptions."""
    fields: Mapping[str, object] = field(default_factory=dict)
    """Of the objective."""
    positions_per_token: int = 1
    """Positions that the layers see for a token of text."""
    supervise_padding: bool = True
    """Whether fine-tuning trains pads: an answer is denoised in a canvas with room for more, and has to end in it."""


KINDS = {
    "mdlm": Kind(MDLMModel, MaskedDiffusion, False, "{family} as a masked diffusion model"),
    "a2d": Kind(A2DModel, MaskedDiffusion, True, "{family}, autoregressive before, as a masked diffusion model"),
    "bd3lm": Kind(
        BD3LMModel,
        BlockDiffusion,
        False,
        "{family} as a block diffusion model",
        fields={"block_size": 32},
        positions_per_token=2,
        # Answers are filled up with end tokens to the end of their last block, and sampling goes no further.
        supervise_padding=False,
    ),
}


@dataclass(frozen=True)
class RecipeFamily:
    """A family's sizes and facts."""

    name: str
    """First part of its recipes' names."""
    title: str
    """What people call it."""
    sizes: Mapping[str, Size]
    mask_token_id: int
    right_shift: bool = False
    kinds: tuple[str, ...] = tuple(KINDS)
    """Keys of ``KINDS``; names of recipes have them where there are several."""
    objective: Mapping[str, object] = field(default_factory=dict)
    """Fields of the objective in which the family differs from its kind."""
    pretraining: Mapping[str, object] = field(default_factory=dict)
    """Fields of the configuration that only pretraining sets."""
    bos_token_id: int | None = None
    """Put before documents in pretraining, where logits are shifted."""


FAMILIES: list[RecipeFamily] = []
"""All that are registered."""


def family_recipe(
    family: RecipeFamily,
    size: str,
    kind: str,
    task: str,
    *,
    name: str,
    dir: str | None = None,
    init_from: str | None = None,
    dataset: str | None = None,
    tokenizer: str | None = None,
) -> run.Partial:
    """The recipe of one size, kind and task.

    Args:
        family: the family.
        size: a key of ``family.sizes``.
        kind: a key of ``KINDS``.
        task: a key of ``TASKS``.
        name: of the run.
        dir: folder of the run's folder.
        init_from: what to start from, see ``recipes.start.StartFrom``.
        dataset: what to train on, see ``recipes.datasets``.
        tokenizer: of it; a checkpoint brings its own.

    Raises:
        ValueError: for a size, kind or task that there is not, listing those there are, and as
            :func:`check_tokenizer`.
        FileNotFoundError: see :func:`pretraining_data`.
    """
    for field_name, value, known in (("size", size, family.sizes), ("kind", kind, family.kinds), ("task", task, TASKS)):
        if value not in known:
            raise ValueError(f"{field_name}={value!r} of {family.name} is unknown; choose from {', '.join(known)}")
    check_tokenizer(dataset, tokenizer, init_from)
    facts, model_kind = family.sizes[size], KINDS[kind]
    recipe = diffusion_recipe(
        TASKS[task].run,
        model=_model(family, facts, model_kind, task),
        data=_data(
            family,
            task,
            dataset,
            tokenizer,
            has_tokenizer=tokenizer is not None or init_from is not None,
            block_size={**model_kind.fields, **family.objective}.get("block_size"),
            supervise_padding=model_kind.supervise_padding,
            vocab_size=facts.vocab_size,
            micro_batch_size=max(1, facts.micro_batch_size // model_kind.positions_per_token),
        ),
        schedule=_schedule(task, facts, starts_trained=model_kind.adopts or init_from is not None),
        name=name,
        layout=facts.layout,
        dir=dir,
    )
    recipe.init_from, recipe.recipe_mask_token_id = init_from, family.mask_token_id
    set_adapters(recipe, TASKS[task])
    return recipe


def _model(family: RecipeFamily, size: Size, kind: Kind, task: str) -> run.Config:
    config = {"seq_length": SEQ_LENGTH, **FUSIONS, **size.fields}
    if TASKS[task].tuning is None:
        config.update(family.pretraining)
    objective = {"mask_token_id": family.mask_token_id, "right_shift": family.right_shift}
    return run.Config(
        kind.model,
        config=run.Config(size.config, **config),
        objective=run.Config(kind.objective, **objective, **{**kind.fields, **family.objective}),
    )


def _data(
    family: RecipeFamily,
    task: str,
    dataset: str | None,
    tokenizer: str | None,
    *,
    has_tokenizer: bool,
    block_size: int | None,
    supervise_padding: bool,
    vocab_size: int,
    micro_batch_size: int,
) -> run.Config:
    """Without a data set, random tokens; but questions for a fine-tuning that has a tokenizer."""
    sizes = {
        "seq_length": SEQ_LENGTH,
        "micro_batch_size": micro_batch_size,
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "num_val_rows": GLOBAL_BATCH_SIZE,
    }
    if TASKS[task].tuning is not None and has_tokenizer:
        supervised = {"block_size": block_size, "supervise_padding": supervise_padding}
        return supervised_data(dataset, tokenizer, **supervised, **sizes)
    if dataset is not None:
        return pretraining_data(dataset, tokenizer, bos_token_id=family.bos_token_id, **sizes)
    return run.Config(MockDataModule, vocab_size=vocab_size, mask_token_id=family.mask_token_id, **sizes)


def _schedule(task: str, size: Size, starts_trained: bool) -> Schedule:
    if TASKS[task].tuning is not None:
        return TASKS[task].tuning
    if starts_trained:
        return replace(CONTINUE, learning_rate=size.learning_rate / 3)
    return replace(PRETRAIN, learning_rate=size.learning_rate)


def recipe_name(family: RecipeFamily, size: str, kind: str, task: str) -> str:
    """What ``--factory`` calls a recipe."""
    parts = (family.name, size, *((kind,) if len(family.kinds) > 1 else ()), task)
    return "_".join(parts)


def register_family(family: RecipeFamily) -> None:
    """Offer all recipes of a family to the ``nemo`` command."""
    FAMILIES.append(family)
    for size in family.sizes:
        for kind in family.kinds:
            for task in TASKS:
                name = recipe_name(family, size, kind, task)
                register(_factory(family, size, kind, task), target=TASKS[task].command, name=name)


def _factory(family: RecipeFamily, size: str, kind: str, task: str) -> Callable[..., run.Partial]:
    def factory(
        *,
        name: str,
        dir: str | None = None,
        init_from: str | None = None,
        dataset: str | None = None,
        tokenizer: str | None = None,
    ) -> run.Partial:
        start = {"init_from": init_from, "dataset": dataset, "tokenizer": tokenizer}
        return family_recipe(family, size, kind, task, name=name, dir=dir, **start)

    # A size of letters alone is a name, as in LLaDA2.0-mini.
    shown = f"-{size}" if size.isalpha() else f" {size.replace('p', '.').replace('_', '-').upper()}"
    purpose = KINDS[kind].purpose.format(family=f"{family.title}{shown}")
    factory.__doc__ = f"""{TASKS[task].summary.format(purpose=purpose)}

    Args:
        dir: folder of the run's folder.
        name: of the run.
        init_from: folder of a Hugging Face checkpoint, its name on the Hub (hf://NAME), or folder of a NeMo checkpoint;
            None starts from random weights.
        dataset: {TASKS[task].dataset}.
        tokenizer: Hugging Face folder or name, for random weights; a checkpoint brings its own.
    """
    return factory
