"""What a checkpoint is beyond its sizes: mask token, logit shift, attention, block size, dtype, origin."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from nemo.utils import logging

from nemo_dllm.connectors.checkpoint_files import GENERATION_CONFIG_FILE, HFCheckpoint
from nemo_dllm.connectors.config_table import dtype_name
from nemo_dllm.connectors.families.registry import find_family
from nemo_dllm.connectors.family import Family
from nemo_dllm.connectors.mask_token import MaskToken, find_mask_token
from nemo_dllm.connectors.revision import revision_of
from nemo_dllm.connectors.stacked_experts import per_expert
from nemo_dllm.connectors.tensor_dtypes import main_dtype
from nemo_dllm.connectors.tied_head import repeats_head
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer

# config.json has no established name for the shift; this is how dllm's trainers call it.
RIGHT_SHIFT_FIELD = "right_shift_logits"
# Fields of block diffusion that have none either, and their values where config.json is silent.
BLOCK_DEFAULTS = {"ar_loss_weight": 0.0, "block_start": "clean_prefix"}


@dataclass(frozen=True)
class CheckpointFacts:
    """Facts of a Hugging Face checkpoint, as :func:`read_facts` finds them. All are JSON values.

    Args:
        family: name of the family.
        source: folder that was read.
        revision: its commit, see :func:`revision_of`.
        dtype: of most weights, as config.json spells it.
        other_dtypes: of the tensors that have another, by name.
        repeats_head: whether the file holds a tied head too.
        attention: ``causal``, ``bidirectional`` or ``block_causal``: how its own class attends.
        right_shift: whether the logits at position i - 1 predict token i, read as a diffusion model.
        block_size: tokens per block, from config.json or else the family's; None where there are no blocks.
        mask_token_id: from config.json, generation_config.json, the tokenizer, or the family's mask token added to the
            tokenizer; None where there is none. See :func:`find_mask_token`.
        mask_token_added: whether no file of the checkpoint has it.
        special_token_ids: ids of the bos, eos, pad and unk token that config.json and the tokenizer name; config.json
            may have a list of them.
        ar_loss_weight: of the next-token loss that blocks were trained with; above 0, finished blocks attend causally.
        block_start: which logits predict the first token of a block under the shift, see :class:`BlockDiffusion`.
    """

    family: str
    source: str
    revision: str | None
    dtype: str
    other_dtypes: dict[str, str]
    repeats_head: bool
    attention: str
    right_shift: bool
    block_size: int | None
    mask_token_id: int | None
    mask_token_added: bool
    special_token_ids: dict[str, int | list[int]]
    ar_loss_weight: float = BLOCK_DEFAULTS["ar_loss_weight"]
    block_start: str = BLOCK_DEFAULTS["block_start"]

    @property
    def declared_mask_token_id(self) -> int | None:
        """The mask token that a file of the checkpoint names; None where it is to be added."""
        return None if self.mask_token_added else self.mask_token_id

    @property
    def block_fields(self) -> dict[str, Any]:
        """Fields of :class:`BlockDiffusion` that say how the model attends and is sampled; none without blocks."""
        if self.block_size is None:
            return {}
        return {name: getattr(self, name) for name in ("block_size", *BLOCK_DEFAULTS)}

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return getattr(torch, self.other_dtypes.get(name, self.dtype))

    def to_json(self) -> dict[str, Any]:
        """The facts as a dict of JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "CheckpointFacts":
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: where they are those of another version of this package.
        """
        try:
            return cls(**facts)
        except TypeError as error:
            raise ValueError(
                f"the facts of the checkpoint are not of this version ({error}); import it again"
            ) from error


def read_facts(hf_path: str | Path) -> CheckpointFacts:
    """Read the facts of a Hugging Face checkpoint folder.

    Raises:
        FileNotFoundError, ValueError: see :class:`HFCheckpoint`.
        ValueError: for an unknown family, for what :meth:`ConfigTable.check` finds, or a mask token that is another
            special token too.
    """
    checkpoint = HFCheckpoint(hf_path)
    hf = checkpoint.config
    family = find_family(hf)
    try:
        family.config.check(hf)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error
    tokenizer = load_hf_tokenizer(checkpoint.path)
    special_token_ids = _special_token_ids(tokenizer, hf)
    mask_token = checkpoint_mask_token(checkpoint, tokenizer)
    dtype = weights_dtype(checkpoint)
    return CheckpointFacts(
        family=family.name,
        source=str(checkpoint.path),
        revision=revision_of(checkpoint.path),
        dtype=dtype_name(dtype),
        other_dtypes={name: dtype_name(own) for name, own in per_expert(checkpoint).dtypes.items() if own != dtype},
        repeats_head=repeats_head(checkpoint, family),
        attention=family.hf_class(hf).attention,
        right_shift=_said(hf, RIGHT_SHIFT_FIELD, family.right_shift),
        block_size=_block_size(checkpoint, family),
        mask_token_id=mask_token.id,
        mask_token_added=mask_token.added,
        special_token_ids=special_token_ids,
        **{name: _said(hf, name, silent) for name, silent in BLOCK_DEFAULTS.items()},
    )


def _said(hf: Mapping[str, Any], name: str, silent: Any) -> Any:
    """Null says as little as a field that is not there."""
    return silent if hf.get(name) is None else hf[name]


def _block_size(checkpoint: HFCheckpoint, family: Family) -> int | None:
    named = checkpoint.config.get("block_size")
    if named is None and family.block_size is not None:
        logging.info(
            f"{checkpoint.path}: config.json names no block_size; that of family {family.name} is used, "
            f"{family.block_size}; set block_size there if the model was trained with another"
        )
    return family.block_size if named is None else named


def checkpoint_mask_token(checkpoint: HFCheckpoint, tokenizer) -> MaskToken:
    """See :func:`find_mask_token`; ``tokenizer`` is the checkpoint's own, or None."""
    hf, generation = checkpoint.config, checkpoint.json_file(GENERATION_CONFIG_FILE)
    of_tokenizer = getattr(tokenizer, "mask_token_id", None)
    found = find_mask_token(tokenizer, hf, find_family(hf), generation)
    others = {GENERATION_CONFIG_FILE: generation.get("mask_token_id"), "the tokenizer": of_tokenizer}
    for where, other in others.items():
        if other not in (None, found.id):
            logging.warning(f"{checkpoint.path}: the mask token is {found.id}, though {where} names {other}")
    return found


def _special_token_ids(tokenizer, hf: Mapping[str, Any]) -> dict[str, int | list[int]]:
    names = [f"{name}_token_id" for name in ("bos", "eos", "pad", "unk")]
    found = {name: hf[name] if hf.get(name) is not None else getattr(tokenizer, name, None) for name in names}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def weights_dtype(checkpoint: HFCheckpoint) -> torch.dtype:
    """The dtype that most weights have, whatever config.json says.

    Raises:
        ValueError: where models are not trained in it.
    """
    try:
        return main_dtype(checkpoint.dtypes, checkpoint.shapes)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error
