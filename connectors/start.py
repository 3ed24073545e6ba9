"""Training from a Hugging Face checkpoint without converting it first."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import lightning.pytorch as pl
from megatron.core.utils import unwrap_model

from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.connectors.adoption import adopt, adopt_mask_token, check_same_sizes, check_same_source, open_source
from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.companions import FOLDER, copy_companions, read_companions, small_files
from nemo_dllm.connectors.config import Origin
from nemo_dllm.connectors.facts import CheckpointFacts, read_facts
from nemo_dllm.connectors.families.registry import find_family
from nemo_dllm.connectors.load import load_hf_weights
from nemo_dllm.connectors.mask_token import grown_vocab_size, mask_token_at
from nemo_dllm.connectors.nemo_tokenizer import nemo_tokenizer
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer


def adopt_hf_checkpoint(
    model: DiffusionModel, hf_path: str | Path, folder: Path, recipe_mask_token_id: int | None = None
) -> Path:
    """Make a model one of a Hugging Face checkpoint, as :func:`import_hf_checkpoint` does, all but the weights.

    The checkpoint's small files are kept in ``folder``, so that a resumed run does not need the checkpoint, and go from
    there into every checkpoint of the run. Any number of processes may do this at the same time.

    Args:
        model: not built; it gets tokenizer, mask token and vocabulary.
        hf_path: folder of the checkpoint; where it is gone, what ``folder`` holds is used.
        folder: of the run.
        recipe_mask_token_id: see :func:`adopt_mask_token`.

    Returns:
        The folder in ``folder`` for what is kept of this checkpoint.

    Raises:
        FileNotFoundError, ValueError: see :func:`open_source` and :func:`adopt_mask_token`.
    """
    hf_path = Path(hf_path)
    kept = _kept(folder) if not hf_path.exists() else None
    origin = read_companions(kept) if kept else Origin(HFCheckpoint(hf_path).config, read_facts(hf_path))
    check_same_sizes(model, origin, kept or hf_path)
    facts = origin.facts
    adopt_mask_token(model, facts.declared_mask_token_id, facts.source, recipe_mask_token_id)
    companions = kept or _keep(model, hf_path, folder, facts)
    origin = read_companions(companions)
    mask_token_id = model.objective.mask_token_id
    if mask_token_id is None:
        mask_token_id = origin.facts.mask_token_id
    family = find_family(origin.config)
    mask_token = mask_token_at(mask_token_id, load_hf_tokenizer(companions), origin.config, family)
    vocab_size = grown_vocab_size(origin.config, family, mask_token)
    check_same_source(model, origin, companions, vocab_size)
    adopt(model, nemo_tokenizer(companions, mask_token), mask_token.id, vocab_size)
    return companions.parent


def _keep(model: DiffusionModel, hf_path: Path, folder: Path, facts: CheckpointFacts) -> Path:
    source = open_source(model, hf_path, facts)
    content = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in small_files(hf_path).items()}
    told = json.dumps([str(hf_path.resolve()), content, source.mask_token])
    kept = folder / hashlib.sha256(told.encode()).hexdigest()[:12]
    if not kept.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
        copy_companions(hf_path, unfinished / FOLDER, source.facts, source.mask_token)
        try:
            unfinished.rename(kept)
        except OSError:  # Another process was faster.
            shutil.rmtree(unfinished)
    return kept / FOLDER


def _kept(folder: Path) -> Path | None:
    """What was kept last."""
    kept = [path / FOLDER for path in folder.glob("[!.]*") if (path / FOLDER).is_dir()]
    return max(kept, key=os.path.getmtime, default=None)


class HFWeights(pl.Callback):
    """Fills the model with a Hugging Face checkpoint when training starts, unless it goes on from a checkpoint.

    Each process reads its own layers, experts and slices.

    Args:
        hf_path: folder of the checkpoint.
        mask_init: of rows that the vocabulary grows by, see :class:`GrownCheckpoint`.
    """

    def __init__(self, hf_path: str | Path, mask_init: str = "mean"):
        self.hf_path, self.mask_init = hf_path, mask_init

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Load the weights; the optimizers, which hold copies of them in fp32, take those over."""
        if trainer.ckpt_path:
            return
        chunks = unwrap_model([chunk.module for chunk in trainer.strategy.megatron_parallel])
        load_hf_weights(chunks, self.hf_path, mask_init=self.mask_init)
        for optimizer in trainer.strategy.optimizers:
            optimizer.reload_model_params()
        trainer.strategy.barrier("HFWeights")
