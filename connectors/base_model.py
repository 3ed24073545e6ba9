"""The frozen base model of adapters: kept in the folder of the run, found again for resuming and exporting."""

import json
import os
import subprocess
import sys
from pathlib import Path

from nemo.lightning.ckpt_utils import ADAPTER_META_FILENAME
from nemo.utils import logging

BASE_FOLDER = "base"
_BASE_FIELD = "model_ckpt_path"
# A conversion is a process of its own: it changes settings of NeMo and Megatron that a training sets otherwise.
_CONVERT = """
import json, sys
from nemo_dllm.connectors.conversion import import_checkpoint
import_checkpoint(**json.loads(sys.argv[1]))
"""
# Of launchers: they would make the conversion one of many processes.
_DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_", "NODE_RANK", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")


def keep_base(hf_path: Path, folder: Path, *, mask_token_id: int, mask_init: str) -> Path:
    """The import of a Hugging Face checkpoint in a folder of the run, converted where it is not there yet.

    For one process of a run: the others wait for it.

    Args:
        hf_path: folder of the checkpoint.
        folder: what :func:`adopt_hf_checkpoint` returned.
        mask_token_id: the model's.
        mask_init: of rows that the vocabulary grows by, see :class:`GrownCheckpoint`.

    Raises:
        RuntimeError: where the conversion failed; says why.
    """
    base = folder / BASE_FOLDER
    if not base.is_dir():
        conversion = {
            "source": str(hf_path),
            "output_path": str(base),
            "mask_token_id": mask_token_id,
            "mask_init": mask_init,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_DISTRIBUTED)}
        logging.info(f"Converting {hf_path} to {base}, for the adapters to adapt")
        command = [sys.executable, "-c", _CONVERT, json.dumps(conversion)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode and not base.is_dir():  # Another run may have been faster.
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise RuntimeError(f"{hf_path} could not be converted to {base}, for the adapters to adapt: {reason}")
    return base


def base_of(checkpoint: Path) -> Path | None:
    """The NeMo checkpoint that a checkpoint's adapters adapt; None for one with weights of its own.

    That in the folder of the run, wherever that is now, or else where it was in training.

    Raises:
        FileNotFoundError: where it is gone.
    """
    metadata = checkpoint / "weights" / ADAPTER_META_FILENAME
    if not metadata.is_file():
        return None
    named = Path(json.loads(metadata.read_text())[_BASE_FIELD])
    named = named.parent if named.name == "weights" else named
    # RUN/checkpoints/CHECKPOINT, and RUN/start/KEPT/base.
    places = [named]
    if named.name == BASE_FOLDER:
        places.insert(0, checkpoint.resolve().parents[1].joinpath(*named.parts[-3:]))
    for place in places:
        if (place / "weights" / ".metadata").is_file():
            return place
    raise FileNotFoundError(
        f"{checkpoint} holds adapters of {named}, which is no NeMo checkpoint any more; put it back there, or write "
        f"its new folder as {_BASE_FIELD} into {metadata}"
    )
