"""The model of a NeMo checkpoint without its weights, as this machine can run it."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from nemo.lightning import io
from nemo.utils import logging
from torch.distributed.checkpoint.api import CheckpointException

from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.connectors.checkpoint_files import CONFIG_FILE
from nemo_dllm.connectors.new_folder import refuse_unfinished

# Choices of kernels that not every machine has: what they need, and what computes the same without.
_WITHOUT = {
    ("attention_backend", "flex"): ("a CUDA device", "sdpa"),
    ("attention_backend", "te"): ("Transformer Engine", "sdpa"),
    ("transformer_impl", "transformer_engine"): ("Transformer Engine", "local"),
}


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Name a folder of a NeMo checkpoint in whatever goes wrong while it is read: damaged files raise anything.

    Raises:
        ValueError: where something goes wrong.
        MemoryError, PermissionError, torch.OutOfMemoryError: as they are; the files may be whole.
    """
    try:
        yield
    except (MemoryError, PermissionError, torch.OutOfMemoryError):
        raise
    # Torch's is no Exception.
    except (Exception, CheckpointException) as error:
        if "can't allocate memory" in str(error):
            raise ValueError(f"{folder} needs more memory than this machine has free: {error}") from error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ValueError(
            f"{folder} cannot be read ({reason}): it is incomplete, damaged or of another version; take another "
            "checkpoint, or copy it again"
        ) from error


def load_model_context(nemo_path: Path) -> DiffusionModel:
    """The model of a NeMo checkpoint as its configuration, objective and tokenizer, without weights.

    Kernels that it was trained with and this machine lacks are replaced, which is said.

    Raises:
        FileNotFoundError: where there is no checkpoint.
        ValueError: for a Hugging Face checkpoint, a damaged one, and the checkpoint of another kind of model.
    """
    refuse_unfinished(nemo_path)
    if not (nemo_path / "context").is_dir():
        if (nemo_path / CONFIG_FILE).is_file():
            raise ValueError(
                f"{nemo_path} is a Hugging Face checkpoint; import it first (nemo-dllm import, llm.import_ckpt)"
            )
        raise FileNotFoundError(f"{nemo_path} is no NeMo checkpoint: it has no folder 'context'")
    import fiddle as fdl

    with damage_named(nemo_path / "context"):
        config = io.load_context(nemo_path, subpath="model", build=False)
    if not issubclass(fdl.get_callable(config), DiffusionModel):
        raise ValueError(f"{nemo_path} holds a {fdl.get_callable(config).__name__}, not a diffusion model")
    there = {
        "a CUDA device": torch.cuda.is_available(),
        "Transformer Engine": importlib.util.find_spec("transformer_engine") is not None,
    }
    for (field, choice), (needs, instead) in _WITHOUT.items():
        if getattr(config, field) == choice and not there[needs]:
            logging.warning(f"{nemo_path} has {field}={choice!r}, which needs {needs}; {instead!r} is taken here")
            setattr(config, field, instead)
    return fdl.build(config)
