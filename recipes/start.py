"""Where a training starts: random weights, a Hugging Face checkpoint or a NeMo checkpoint."""

from dataclasses import dataclass, fields
from pathlib import Path

import lightning.pytorch as pl
from nemo.lightning import AutoResume, NeMoLogger, RestoreConfig, io
from nemo.utils import AppState

from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
from nemo_dllm.collections.diffusion.model_source import HUB, KEPT_FOLDER, keeps_start, source_path
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.training.checkpoints import seen_by
from nemo_dllm.collections.diffusion.training.rank_zero import told_by_rank_zero
from nemo_dllm.collections.diffusion.training.resume import ResumeLatest, check_same_model
from nemo_dllm.connectors.adoption import adopt_import, adopt_mask_token
from nemo_dllm.connectors.base_model import base_of, keep_base
from nemo_dllm.connectors.companions import read_origin
from nemo_dllm.connectors.importers import local_folder
from nemo_dllm.connectors.load import OtherModelError
from nemo_dllm.connectors.start import HFWeights, adopt_hf_checkpoint
from nemo_dllm.recipes.fitting import way_out


@dataclass(kw_only=True)
class StartFrom(ResumeLatest):
    """Goes on from the latest complete checkpoint of the run, and without one starts from other weights.

    The model gets tokenizer, mask token and vocabulary of what it starts from, and so does the data where it was given
    no tokenizer. A mask token that is declared there, by a file of a Hugging Face checkpoint or the objective of a NeMo
    one, counts; where there is none, the objective's.

    Args:
        init_from: folder of a Hugging Face checkpoint, its name on the Hugging Face Hub (``hf://NAME``), or folder of a
            NeMo checkpoint.
        mask_init: of rows that the vocabulary grows by: ``mean``, ``random`` or ``zero``.
        data: the run's data module.
        recipe_mask_token_id: of a recipe, whose objective has it where nobody has chosen another; another than this one
            has to be the one declared.
        adapters: whether the weights stay as they are, and adapters are trained: a Hugging Face checkpoint is then
            converted into the folder of the run, which resuming and exporting take it from.
    """

    init_from: str
    mask_init: str = "mean"
    data: pl.LightningDataModule | None = None
    recipe_mask_token_id: int | None = None
    adapters: bool = False

    def setup(self, trainer, model=None) -> None:
        """See :class:`ResumeLatest`.

        Raises:
            FileNotFoundError, ValueError: for ``init_from`` that is absent, damaged or another model's.
        """
        try:
            self._adopt(trainer, model)
        except OtherModelError as error:
            raise ValueError(f"{error}; {way_out(error, type(model))}") from error
        if model.tokenizer is not None and getattr(self.data.__io__, "tokenizer", None) is None:
            self.data.tokenizer = model.tokenizer
        if isinstance(self.data, MockDataModule):
            # Random tokens are all but the mask token, which may lie beyond them.
            mask_token_id = model.objective.mask_token_id
            is_among_them = mask_token_id is not None and mask_token_id < self.data.vocab_size
            self.data.mask_token_id = mask_token_id if is_among_them else None
        super().setup(trainer, model)

    def _adopt(self, trainer: pl.Trainer, model: DiffusionModel) -> None:
        source = Path(self.init_from)
        if (source / "context").is_dir():
            self.restore_config = RestoreConfig(path=str(source))
            if read_origin(source) is not None:
                adopt_import(model, source, self.recipe_mask_token_id)
            else:
                self._start_from_trained(source, model)
        else:
            self._start_from_hf(trainer, model)

    def _start_from_trained(self, source: Path, model: DiffusionModel) -> None:
        # What shapes the weights comes first: with other weights, no mask token is of use.
        check_same_model(source, model.config)
        trained = io.load_context(source, subpath="model", build=False)
        # The model of a NeMo checkpoint may be NeMo's own, without an objective.
        declared = getattr(getattr(trained, "objective", None), "mask_token_id", None)
        adopt_mask_token(model, declared, source, self.recipe_mask_token_id)
        if model.tokenizer is None:
            model.tokenizer = io.load_context(source, subpath="model.tokenizer")

    def _start_from_hf(self, trainer: pl.Trainer, model: DiffusionModel) -> None:
        resumes = self.resume_from_path or self.find(trainer)
        source = Path(self.init_from.removeprefix(HUB))
        if not resumes or source.exists():
            source = local_folder(source_path(self.init_from, "init_from"))
        kept = adopt_hf_checkpoint(model, source, Path(AppState().log_dir) / KEPT_FOLDER, self.recipe_mask_token_id)
        if resumes:
            return
        if self.adapters:
            mask = {"mask_token_id": model.objective.mask_token_id, "mask_init": self.mask_init}
            base = told_by_rank_zero(trainer, lambda: str(keep_base(source, kept, **mask)), "base model")
            self.restore_config = RestoreConfig(path=str(seen_by(trainer.global_rank, Path(base))))
        else:
            trainer.callbacks.append(HFWeights(source, self.mask_init))

    def _get_base_model_path_for_adapter(self, adapter_meta_path: Path, model) -> Path:
        return base_of(Path(adapter_meta_path).parents[1])


def check_start(init_from: str | None, log: NeMoLogger | None, resume: AutoResume | None) -> None:
    """Check that there is what a run starts from, before anything that takes longer.

    A run that may go on from a checkpoint of its own does not need it.

    Raises:
        FileNotFoundError, NotADirectoryError: see :func:`source_path`.
    """
    goes_on = resume is not None and (resume.resume_from_path or resume.resume_from_directory)
    goes_on = goes_on or keeps_start(getattr(log, "log_dir", None), getattr(log, "name", None))
    if init_from is not None and not goes_on:
        source_path(init_from, "init_from", with_weights=True)


def start_from(init_from: str | None, resume: AutoResume | None, **settings: object) -> AutoResume | None:
    """The resume object of a run that starts from ``init_from``, see :class:`StartFrom`; ``resume`` for None."""
    if init_from is None:
        return resume
    if resume is not None:
        settings |= {field.name: getattr(resume, field.name) for field in fields(resume)}
    return StartFrom(init_from=str(init_from), **settings)
