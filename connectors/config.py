"""NeMo's configuration of a Hugging Face checkpoint, and the config.json of a trained diffusion model."""

from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.config_table import dtype_name
from nemo_dllm.connectors.facts import BLOCK_DEFAULTS, RIGHT_SHIFT_FIELD, CheckpointFacts, weights_dtype
from nemo_dllm.connectors.families.registry import family_of, find_family
from nemo_dllm.connectors.vocabulary_growth import vocabulary_fields


class Origin(NamedTuple):
    """The checkpoint that training started from."""

    config: dict[str, Any]
    """Its config.json."""
    facts: CheckpointFacts
    """Its facts, as read at import."""


def hf_to_nemo_config(hf_path: str | Path, *, vocab_size: int | None = None):
    """The NeMo ``GPTConfig`` that describes a Hugging Face checkpoint: sizes, rotary embedding, tying and dtype.

    ``params_dtype``, ``bf16`` and ``fp16`` follow the checkpoint's dtype; ``seq_length`` is its context, tokens.

    Args:
        hf_path: folder of the checkpoint.
        vocab_size: tokens; None takes those of the checkpoint.

    Raises:
        FileNotFoundError, ValueError: see :class:`HFCheckpoint`.
        ValueError: for an unknown family, and values of config.json that are absent or not supported.
    """
    checkpoint = HFCheckpoint(hf_path)
    family = find_family(checkpoint.config)
    dtype = weights_dtype(checkpoint)
    tokens = {} if vocab_size is None else dict.fromkeys(vocabulary_fields(family), vocab_size)
    return family.build_nemo_config(
        checkpoint.config | tokens, params_dtype=dtype, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16
    )


def diffusion_hf_config(
    nemo_config, objective, *, vocab_size: int, dtype: torch.dtype, origin: Origin | None = None
) -> dict[str, Any]:
    """The config.json of a diffusion model.

    Based on the checkpoint that training started from, it is that config.json, changed only where the model differs;
    equal if nothing does. An autoregressive origin becomes the family's diffusion class.

    Args:
        nemo_config: the model's configuration.
        objective: the model's objective: ``mask_token_id`` and ``right_shift``, and ``block_size``,
            ``ar_loss_weight`` and ``block_start`` where it has blocks.
        vocab_size: tokens: rows of the exported tables.
        dtype: of the exported tensors.
        origin: the checkpoint that training started from; None for a model trained from scratch.
    """
    family = family_of(nemo_config)
    nemo_config = copy(nemo_config)
    nemo_config.vocab_size = vocab_size
    hf = family.config.to_hf(nemo_config) if origin is None else family.config.update(origin.config, nemo_config)
    if origin is None or origin.facts.dtype != dtype_name(dtype):
        hf["dtype" if "dtype" in hf else "torch_dtype"] = dtype_name(dtype)
    told = {"mask_token_id": objective.mask_token_id, RIGHT_SHIFT_FIELD: objective.right_shift}
    if objective.block_size is not None:
        told |= {name: getattr(objective, name) for name in ("block_size", *BLOCK_DEFAULTS)}
    if origin is None or origin.facts.attention == "causal":
        target = family.diffusion_class
        # Rules in full, both spellings of the rotary embedding: the other class may have defaults of its own.
        hf |= family.config.rule_fields(nemo_config)
        hf |= {"model_type": target.model_type, "architectures": [target.architecture]}
        hf.pop("auto_map", None)  # It names the classes of the origin.
        if target.code is not None:
            hf["auto_map"] = dict(target.code.auto_map)
        return hf | {name: value for name, value in told.items() if value != BLOCK_DEFAULTS.get(name, ...)}
    hf["model_type"] = family.hf_class(origin.config).exported_as or hf["model_type"]
    # What the origin's reader finds without a field needs none; the mask token is named wherever it was found.
    found = {
        "mask_token_id": origin.config.get("mask_token_id"),
        RIGHT_SHIFT_FIELD: origin.facts.right_shift,
        "block_size": origin.facts.block_size,
        **{name: getattr(origin.facts, name) for name in BLOCK_DEFAULTS},
    }
    return hf | {name: value for name, value in told.items() if value != found[name]}
