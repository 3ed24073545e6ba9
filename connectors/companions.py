"""The small files of a Hugging Face checkpoint, kept in ``context/hf`` of NeMo checkpoints.

NeMo copies the tokenizer's folder into every checkpoint that it saves. The tokenizer of an imported model is loaded
from ``context/hf``, so these files follow it through training, and the export finds them in any later checkpoint.
"""

import json
import shutil
from pathlib import Path

from nemo_dllm.connectors.checkpoint_files import CONFIG_FILE
from nemo_dllm.connectors.config import Origin
from nemo_dllm.connectors.facts import CheckpointFacts

FOLDER = "hf"
FACTS_FILE = "nemo_dllm.json"

# Configuration, tokenizer, chat template, generation settings and remote code; never weights or their indices.
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


def copy_companions(hf_path: Path, folder: Path, facts: CheckpointFacts) -> None:
    """Copy the small files of a Hugging Face checkpoint, byte for byte, and write its facts beside them.

    Args:
        hf_path: the checkpoint.
        folder: where to; made here.
        facts: facts of the checkpoint.
    """
    folder.mkdir(parents=True)
    for file in sorted(hf_path.iterdir()):
        if file.is_file() and file.suffix in _SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
    (folder / FACTS_FILE).write_text(json.dumps(facts.to_json(), indent=2) + "\n")


def read_origin(nemo_path: Path) -> Origin | None:
    """The checkpoint that a NeMo checkpoint's training started from; None where it did not start from an import."""
    folder = nemo_path / "context" / FOLDER
    if not (folder / FACTS_FILE).is_file():
        return None
    return Origin(
        config=json.loads((folder / CONFIG_FILE).read_text()),
        facts=CheckpointFacts.from_json(json.loads((folder / FACTS_FILE).read_text())),
    )


def companion_files(nemo_path: Path) -> dict[str, bytes]:
    """Content of the origin's small files by name, without its facts; empty where there is no origin."""
    folder = nemo_path / "context" / FOLDER
    files = folder.iterdir() if folder.is_dir() else ()
    return {file.name: file.read_bytes() for file in files if file.name != FACTS_FILE}
