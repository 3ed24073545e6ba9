"""Which checkpoint a run goes on from, and at which step."""

from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
from megatron.core.num_microbatches_calculator import get_num_microbatches
from nemo.lightning import AutoResume, io
from nemo.utils import AppState, logging

from nemo_dllm.collections.diffusion.training.checkpoints import latest_checkpoint, patiently, seen_by
from nemo_dllm.collections.diffusion.training.rank_zero import told_by_rank_zero

# Fields of a NeMo config that decide the shapes of the weights.
_SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "vocab_size",
    "share_embeddings_and_output_weights",
    "qk_layernorm",
    "add_qkv_bias",
)


def check_same_model(checkpoint: Path, config) -> None:
    """Check that a checkpoint's weights fit a model, before anything is loaded.

    Args:
        checkpoint: folder of a NeMo checkpoint.
        config: the model's ``GPTConfig``.

    Raises:
        FileNotFoundError: where the folder holds no NeMo checkpoint.
        ValueError: where the checkpoint is another model's; names the fields that differ.
    """
    context = checkpoint / "context"
    if not (context / "io.json").is_file():
        raise FileNotFoundError(
            f"{checkpoint} holds no NeMo checkpoint (no context/io.json); "
            "name the folder that contains `context` and `weights`"
        )
    saved = io.load_context(context, subpath="model.config")
    differences = [
        f"{field}={getattr(saved, field)} there, {getattr(config, field)} here"
        for field in _SHAPE_FIELDS
        if hasattr(saved, field) and hasattr(config, field) and getattr(saved, field) != getattr(config, field)
    ]
    if differences:
        raise ValueError(
            f"the checkpoint {checkpoint} is another model's: {'; '.join(differences)}. "
            "Choose another run name or log folder, or the recipe that wrote it"
        )


def check_same_tokens(checkpoint: Path, tokenizer, objective) -> None:
    """Check that token ids and logits mean in a run what they mean in its checkpoint.

    Args:
        checkpoint: folder of a NeMo checkpoint.
        tokenizer: the run's NeMo tokenizer.
        objective: the run's objective.

    Raises:
        ValueError: where the tokens, the mask token or the logit shift are others.
    """
    # Not the whole model: that would ask for the layers that it was trained with.
    context = checkpoint / "context"
    saved_tokenizer = io.load_context(context, subpath="model.tokenizer")
    saved_objective = io.load_context(context, subpath="model.objective")
    if _vocabulary(saved_tokenizer) != _vocabulary(tokenizer):
        raise ValueError(
            f"the checkpoint {checkpoint} was trained with another tokenizer, of {saved_tokenizer.vocab_size} tokens; "
            "go on with the text (data.path) or data.tokenizer of that run, or choose another run name or log folder"
        )
    for field in ("mask_token_id", "right_shift"):
        there, here = getattr(saved_objective, field), getattr(objective, field)
        if None not in (there, here) and there != here:
            raise ValueError(
                f"the checkpoint {checkpoint} was trained with model.objective.{field}={there}, here it is {here}; "
                f"set {field}={there}, or choose another run name or log folder"
            )


def _vocabulary(tokenizer) -> dict | int | None:
    hugging_face = getattr(tokenizer, "tokenizer", None)
    return hugging_face.get_vocab() if hasattr(hugging_face, "get_vocab") else getattr(tokenizer, "vocab_size", None)


class ResumedTokens(pl.Callback):
    """Refuses to go on from a checkpoint whose token ids mean something else, before anything is built."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare with the checkpoint that the trainer is to go on from."""
        if trainer.ckpt_path:
            # NeMo points at the weights inside the checkpoint.
            checkpoint = Path(str(trainer.ckpt_path).removesuffix("/weights"))
            check_same_tokens(checkpoint, pl_module.tokenizer, pl_module.objective)


@dataclass(kw_only=True)
class ResumeLatest(AutoResume):
    """NeMo's ``AutoResume`` that goes on from the latest complete checkpoint of the run.

    A checkpoint cut short by a kill is passed over, whatever its name; the one before it is used. A checkpoint of
    another model is refused with the fields that differ. Fields: see ``AutoResume``; an explicit ``resume_from_path``
    wins over what is found, and what is found wins over the start weights of ``restore_config``.
    """

    resume_if_exists: bool = True
    resume_ignore_no_checkpoint: bool = True

    # Not a field: what was found, alone in a tuple, once that is known.
    _outcome = ()

    def setup(self, trainer, model=None) -> None:
        """Point the trainer at the checkpoint to go on from.

        Raises:
            FileNotFoundError: where ``resume_from_path`` or ``restore_config.path`` does not exist.
            ValueError: where the checkpoint is another model's.
        """
        for field, path in (
            ("resume.resume_from_path", self.resume_from_path),
            ("resume.restore_config.path", getattr(self.restore_config, "path", None)),
        ):
            if path and "://" not in str(path) and not Path(path).exists():
                raise FileNotFoundError(f"{field}={path} does not exist; name a checkpoint folder or leave it out")
        found = self.resume_from_path or self.find(trainer)
        if found and model is not None:
            check_same_model(Path(found), model.config)
            logging.info(f"Going on from {found}")
        elif self.restore_config and "://" not in str(self.restore_config.path) and model is not None:
            check_same_model(Path(self.restore_config.path), model.config)
        super().setup(trainer, model)

    def find(self, trainer: pl.Trainer) -> Path | None:
        """The latest complete checkpoint of the run; None without one, and where none is to be looked for.

        Rank 0 looks, and all ranks go on from what it found: a shared file system may show each of them another state.

        Raises:
            FileNotFoundError: where there has to be a checkpoint and is none, or another rank does not see it.
            OSError: where the folder cannot be read for 15 seconds.
        """
        if self.resume_if_exists and not self._outcome:
            found = told_by_rank_zero(trainer, self._look)
            self._outcome = (found and seen_by(trainer.global_rank, Path(found)),)
        return self._find_trainer_ckpt_path()

    def _find_trainer_ckpt_path(self) -> Path | None:
        return self._outcome[0] if self._outcome else None

    def _look(self) -> str | None:
        log_dir = AppState().log_dir
        folder = self.resume_from_directory or (log_dir and Path(log_dir) / "checkpoints")
        if not folder:
            return None
        found = patiently(lambda: latest_checkpoint(Path(folder)))
        if found is None and not self.resume_ignore_no_checkpoint:
            raise FileNotFoundError(
                f"there is no complete checkpoint in {folder}; resume.resume_ignore_no_checkpoint=True starts anew"
            )
        return found and str(found)


class ResumedCounters(pl.Callback):
    """Lets Lightning count a resumed run's batches as it counts those of an uninterrupted run.

    Validation then runs after the same steps, and once more after the last one. On its own, Lightning restores the
    batches of the epoch one short where the checkpoint was saved during a training step, and takes optimizer steps off
    a number of micro-batches to know how many are left: a larger global batch could end the epoch early, and a new
    epoch would feed the samples since the checkpoint again.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from the optimizer step of the checkpoint."""
        fit_loop = trainer.fit_loop
        if not fit_loop.restarting:
            return
        step = trainer.global_step
        batches = fit_loop.epoch_loop.batch_progress
        for count in (batches.total, batches.current):
            count.ready = count.started = count.processed = count.completed = step
        # The fetcher has as many micro-batches to go as its length exceeds the steps.
        fit_loop._data_fetcher.length = step + (trainer.max_steps - step) * get_num_microbatches()
        fit_loop.max_batches = fit_loop._data_fetcher.length
