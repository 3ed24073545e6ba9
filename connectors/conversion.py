"""Import without a model at hand: the folder says which configuration, kind of model and objective it needs."""

from pathlib import Path

from nemo_dllm.collections.diffusion.model_source import source_path
from nemo_dllm.collections.diffusion.models.a2d import A2DModel
from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.facts import read_facts
from nemo_dllm.connectors.hf_import import import_hf_checkpoint
from nemo_dllm.connectors.importers import local_folder

KINDS = {"a2d": A2DModel, "mdlm": MDLMModel, "bd3lm": BD3LMModel}

# What a checkpoint becomes where nobody says.
_KIND_OF_ATTENTION = {"causal": "a2d", "bidirectional": "mdlm", "block_causal": "bd3lm"}


def diffusion_model(
    source: str | Path,
    kind: str | None = None,
    mask_token_id: int | None = None,
    right_shift: bool | None = None,
    block_size: int | None = None,
) -> DiffusionModel:
    """An unbuilt model for a Hugging Face checkpoint.

    Args:
        source: folder of the checkpoint, or its name on the Hugging Face Hub.
        kind: ``a2d``, ``mdlm`` or ``bd3lm``; None takes ``a2d`` for an autoregressive checkpoint, and what a diffusion
            model is.
        mask_token_id: None takes the checkpoint's, or adds one.
        right_shift: whether the logits at position i - 1 predict token i; None takes the checkpoint's.
        block_size: tokens per block, of ``bd3lm``; None takes the checkpoint's, or the objective's default.

    Raises:
        FileNotFoundError, ValueError: see :class:`HFCheckpoint`; and for an unknown kind.
    """
    folder = local_folder(source_path(source))
    facts = read_facts(folder)
    kind = kind or _KIND_OF_ATTENTION[facts.attention]
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown; choose from {', '.join(KINDS)}")
    fields = {
        "mask_token_id": mask_token_id,
        "right_shift": facts.right_shift if right_shift is None else right_shift,
    }
    if kind == "bd3lm":
        named = {} if block_size is None else {"block_size": block_size}
        objective = BlockDiffusion(**fields, **(facts.block_fields | named))
    else:
        objective = MaskedDiffusion(**fields)
    return KINDS[kind](hf_to_nemo_config(folder), objective)


def import_checkpoint(
    source: str | Path,
    output_path: str | Path,
    *,
    kind: str | None = None,
    mask_token_id: int | None = None,
    mask_init: str = "mean",
    overwrite: bool = False,
) -> Path:
    """Write a Hugging Face checkpoint as a NeMo checkpoint that trainings start from.

    Args:
        source, kind, mask_token_id: see :func:`diffusion_model`.
        output_path, mask_init, overwrite: see :func:`import_hf_checkpoint`.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: see there.
    """
    folder = local_folder(source_path(source))
    model = diffusion_model(folder, kind, mask_token_id)
    return import_hf_checkpoint(model, folder, output_path, overwrite=overwrite, mask_init=mask_init)
