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
from nemo_dllm.connectors.families.registry import find_family
from nemo_dllm.connectors.json_files import read_json_object
from nemo_dllm.connectors.mask_token import MaskToken
from nemo_dllm.connectors.shard_layout import ShardLayout, read_shard_layout
from nemo_dllm.connectors.tokenizer_files import name_mask_token

FOLDER = "hf"
FACTS_FILE = "nemo_dllm.json"
SHARDS_FILE = "nemo_dllm_shards.json"
SUMMARY_FILE = "nemo_dllm_conversion.json"

# Folder of chat templates beside the first.
CHAT_TEMPLATES = "additional_chat_templates"
# Configuration, tokenizer, chat template, generation settings and remote code; never weights or their indices.
_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


def copy_companions(hf_path: Path, folder: Path, facts: CheckpointFacts, mask_token: MaskToken) -> None:
    """Copy the small files of a Hugging Face checkpoint, byte for byte, and write facts and shards beside them.

    The tokenizer's name the mask token, see :func:`name_mask_token`: a checkpoint that becomes another model needs it
    there too.

    Args:
        hf_path: the checkpoint.
        folder: where to; made here.
        facts: facts of the checkpoint.
        mask_token: the mask token in use.
    """
    folder.mkdir(parents=True)
    for name, file in small_files(hf_path).items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / name)
    # A diffusion model that says elsewhere which token is its mask stays as it is.
    if facts.attention == "causal" or mask_token.id != facts.declared_mask_token_id:
        name_mask_token(folder, mask_token, find_family(read_json_object(folder / CONFIG_FILE)).mask_token)
    (folder / FACTS_FILE).write_text(json.dumps(facts.to_json(), indent=2) + "\n")
    layout = read_shard_layout(hf_path)
    if layout is not None:
        (folder / SHARDS_FILE).write_text(json.dumps(layout._asdict(), indent=2) + "\n")


def small_files(hf_path: Path) -> dict[str, Path]:
    """Files of a Hugging Face checkpoint that are neither weights nor about them, by their names in the folder."""
    files = sorted([*hf_path.iterdir(), *hf_path.glob(f"{CHAT_TEMPLATES}/*.jinja")])
    return {
        file.relative_to(hf_path).as_posix(): file
        for file in files
        if file.is_file() and file.suffix in _SUFFIXES and not _is_about_weights(file.name)
    }


def _is_about_weights(name: str) -> bool:
    return name.endswith(".index.json") or name in (SUMMARY_FILE, SHARDS_FILE)


def read_origin(nemo_path: Path) -> Origin | None:
    """The checkpoint that a NeMo checkpoint's training started from; None where it did not start from an import."""
    return read_companions(nemo_path / "context" / FOLDER)


def read_companions(folder: Path) -> Origin | None:
    """The checkpoint whose small files a folder holds; None where :func:`copy_companions` did not write it."""
    if not (folder / FACTS_FILE).is_file():
        return None
    return Origin(
        config=read_json_object(folder / CONFIG_FILE),
        facts=CheckpointFacts.from_json(read_json_object(folder / FACTS_FILE)),
    )


def companion_files(nemo_path: Path) -> dict[str, bytes]:
    """Content of the origin's small files by name, without what was written beside them; empty without an origin."""
    folder = nemo_path / "context" / FOLDER
    files = small_files(folder) if folder.is_dir() else {}
    return {name: file.read_bytes() for name, file in files.items() if name != FACTS_FILE}


def sample_length(folder: Path) -> int | None:
    """Tokens of the samples that an export was trained with; None where the folder is no export of ours."""
    file = folder / SUMMARY_FILE
    return read_json_object(file).get("seq_length") if file.is_file() else None


def origin_layout(nemo_path: Path) -> ShardLayout | None:
    """The origin's layout of shards; None where it had pickles, or there is no origin."""
    file = nemo_path / "context" / FOLDER / SHARDS_FILE
    return ShardLayout(**read_json_object(file)) if file.is_file() else None
