"""NeMo's tokenizer of a checkpoint folder."""

import shutil
from pathlib import Path
from typing import Any

from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.lightning import io
from nemo.lightning.io.artifact import DirOrStringArtifact

from nemo_dllm.connectors.mask_token import MaskToken
from nemo_dllm.connectors.tokenizer_files import is_special, load_hf_tokenizer


class FolderTokenizer(AutoTokenizer):
    """NeMo's tokenizer over :func:`load_hf_tokenizer`, which runs no code of the folder."""

    def _initialize_tokenizer(self, pretrained_model_name: str, *_: Any) -> None:
        self.tokenizer = load_hf_tokenizer(pretrained_model_name)


class FolderArtifact(DirOrStringArtifact):
    """A folder with the folders in it; NeMo's fails on those."""

    def dump(self, instance: Any, value: str, absolute_dir: str | Path, relative_dir: str | Path) -> Any:
        """Copy the folder to ``absolute_dir / relative_dir``; returns its path from ``absolute_dir``."""
        if not Path(value).is_dir():
            return super().dump(instance, value, absolute_dir, relative_dir)
        target = Path(relative_dir) / Path(value).name
        shutil.copytree(value, Path(absolute_dir) / target, copy_function=shutil.copyfile)
        return str(target)


io.track_io(FolderTokenizer, artifacts=[FolderArtifact("pretrained_model_name")])


def nemo_tokenizer(folder: str | Path, mask_token: MaskToken) -> FolderTokenizer | None:
    """The tokenizer of a checkpoint folder, with the mask token; None where the folder has no tokenizer.

    A mask token that text uses stays text.
    """
    hf_tokenizer = load_hf_tokenizer(folder)
    if hf_tokenizer is None:
        return None
    return FolderTokenizer(
        str(folder),
        mask_token=mask_token.text if mask_token.added or is_special(hf_tokenizer, mask_token.id) else None,
        # NeMo would empty this list.
        additional_special_tokens=list(hf_tokenizer.additional_special_tokens),
    )
