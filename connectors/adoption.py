"""What a model takes over from the checkpoint that it starts from: tokenizer, mask token, vocabulary."""

from pathlib import Path
from typing import NamedTuple

from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.utils import logging

from nemo_dllm.collections.diffusion.models.a2d import A2DModel
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.companions import read_origin
from nemo_dllm.connectors.config import Origin
from nemo_dllm.connectors.facts import CheckpointFacts, checkpoint_mask_token, read_facts
from nemo_dllm.connectors.families.registry import find_family
from nemo_dllm.connectors.load import check_fits_config
from nemo_dllm.connectors.mask_token import MaskToken, grown_vocab_size, mask_token_at
from nemo_dllm.connectors.model_context import load_model_context
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer
from nemo_dllm.connectors.vocabulary_growth import vocabulary_fields


class Source(NamedTuple):
    """A Hugging Face checkpoint that a model can start from."""

    checkpoint: HFCheckpoint
    facts: CheckpointFacts
    mask_token: MaskToken
    """The one that the model gets."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the model: the checkpoint's, and more where the mask token needs it."""
        return grown_vocab_size(self.checkpoint.config, find_family(self.checkpoint.config), self.mask_token)


def open_source(model: DiffusionModel, hf_path: str | Path, facts: CheckpointFacts | None = None) -> Source:
    """Open a Hugging Face checkpoint for a model.

    Args:
        model: not built.
        hf_path: folder of the checkpoint.
        facts: of it, where they have been read.

    Raises:
        FileNotFoundError, ValueError: see :class:`HFCheckpoint`.
        ValueError: where the model contradicts the checkpoint, or there is no mask token.
    """
    checkpoint, facts = HFCheckpoint(hf_path), facts or read_facts(hf_path)
    origin = Origin(checkpoint.config, facts)
    check_same_sizes(model, origin, checkpoint.path)
    source = Source(checkpoint, facts, _mask_token(model.objective, checkpoint))
    check_same_source(model, origin, checkpoint.path, source.vocab_size)
    return source


def adopt_import(model: DiffusionModel, nemo_path: str | Path, recipe_mask_token_id: int | None = None) -> None:
    """Give a model the tokenizer, the vocabulary and the mask token of an imported checkpoint.

    Args:
        model: not built.
        nemo_path: the checkpoint.
        recipe_mask_token_id: see :func:`adopt_mask_token`.

    Raises:
        ValueError: where the checkpoint is no import, or of another model, or its mask token or logit shift another.
    """
    nemo_path = Path(nemo_path)
    origin = read_origin(nemo_path)
    if origin is None:
        raise ValueError(f"{nemo_path} is no import of a Hugging Face checkpoint; remove it or choose another folder")
    imported = load_model_context(nemo_path)
    check_same_source(model, origin, nemo_path, imported.config.vocab_size)
    adopt_mask_token(model, imported.objective.mask_token_id, nemo_path, recipe_mask_token_id)
    adopt(model, imported.tokenizer, imported.objective.mask_token_id, imported.config.vocab_size)


def adopt_mask_token(
    model: DiffusionModel, declared: int | None, where: str | Path, recipe_mask_token_id: int | None = None
) -> None:
    """Give a model the mask token that a checkpoint declares, if it declares one.

    Args:
        model: not built.
        declared: None leaves the objective as it is.
        where: the checkpoint, for errors.
        recipe_mask_token_id: of a recipe, which nobody has chosen for this checkpoint.

    Raises:
        ValueError: where the objective has another, and that is not the recipe's.
    """
    chosen = model.objective.mask_token_id
    if declared is None or chosen == declared:
        return
    if chosen is not None and chosen != recipe_mask_token_id:
        raise ValueError(
            f"model.objective.mask_token_id={chosen} contradicts {where}, whose mask token is {declared}; set it to "
            f"{declared} or None (null on the command line), which takes the checkpoint's"
        )
    if chosen is not None:
        logging.info(f"the mask token is {declared}, that of {where}, and not {chosen}, the recipe's")
    for objective in (model.objective, model.__io__.objective):
        objective.mask_token_id = declared


def adopt(model: DiffusionModel, tokenizer: TokenizerSpec | None, mask_token_id: int, vocab_size: int) -> None:
    """Set what a model is, and what its checkpoints say about it.

    Args:
        model: not built.
        tokenizer: None keeps the model's.
        mask_token_id: for an objective that names none.
        vocab_size: tokens, for a configuration that names fewer.
    """
    if model.objective.mask_token_id is None:
        for objective in (model.objective, model.__io__.objective):
            objective.mask_token_id = mask_token_id
    if model.config.vocab_size is not None and model.config.vocab_size < vocab_size:
        for config in (model.config, model.__io__.config):
            config.vocab_size = vocab_size
    if tokenizer is not None:
        model.tokenizer = tokenizer
        model.__io__.tokenizer = tokenizer.__io__


def _mask_token(objective, checkpoint: HFCheckpoint) -> MaskToken:
    tokenizer, hf = load_hf_tokenizer(checkpoint.path), checkpoint.config
    family = find_family(hf)
    if objective.mask_token_id is not None:
        return mask_token_at(objective.mask_token_id, tokenizer, hf, family)
    found = checkpoint_mask_token(checkpoint, tokenizer)
    if found.id is None:
        raise ValueError(
            f"{checkpoint.path} has no mask token, and no tokenizer to add one to; set mask_token_id of the objective "
            f"to the id of an unused token below {family.vocab_size(hf)}"
        )
    return found


def check_same_sizes(model: DiffusionModel, origin: Origin, where: Path) -> None:
    """Check what can be told before the mask token is known: with other sizes, none would do.

    Args:
        model, origin, where: see :func:`check_same_source`.

    Raises:
        ValueError: where the configuration is another; the vocabulary may still be the one that the mask token needs.
    """
    declared, vocab_size = origin.facts.declared_mask_token_id, model.config.vocab_size
    mask_token_id = model.objective.mask_token_id if declared is None else declared
    fits_vocabulary = vocab_size is None or mask_token_id in (None, vocab_size - 1)
    unknown = vocabulary_fields(find_family(origin.config)) if fits_vocabulary else ()
    check_fits_config(model.config, origin.config | dict.fromkeys(unknown, vocab_size), where=where)


def check_same_source(model: DiffusionModel, origin: Origin, where: Path, vocab_size: int) -> None:
    """Check that a model can start from a checkpoint.

    Args:
        model: not built.
        origin: config.json and facts of the checkpoint.
        where: the checkpoint, for errors.
        vocab_size: tokens once it has a mask token; the model may have these or the checkpoint's.

    Raises:
        ValueError: where configuration, kind or logit shift are others.
    """
    facts = origin.facts
    if isinstance(model, A2DModel) and facts.attention != "causal":
        fitting = {"bidirectional": "MDLMModel", "block_causal": "BD3LMModel"}[facts.attention]
        raise ValueError(
            f"{facts.source} is a diffusion model already ({facts.attention} attention), and A2DModel starts from an "
            f"autoregressive one; take {fitting}"
        )
    grown = vocabulary_fields(find_family(origin.config)) if model.config.vocab_size == vocab_size else ()
    check_fits_config(model.config, origin.config | dict.fromkeys(grown, vocab_size), where=where)
    # A model that began autoregressive may be trained either way; a diffusion model has one already.
    if facts.attention != "causal" and model.objective.right_shift != facts.right_shift:
        raise ValueError(
            f"right_shift={model.objective.right_shift} of the objective contradicts {facts.source}, a diffusion model "
            f"trained with right_shift={facts.right_shift}; set it to that"
        )
