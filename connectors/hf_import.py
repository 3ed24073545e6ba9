"""From a Hugging Face checkpoint to a NeMo checkpoint that trainings start from."""

import shutil
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from nemo import lightning as nl
from nemo.lightning.io.pl import TrainerContext

from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.models.saving import keep_write_results_in_process
from nemo_dllm.collections.diffusion.single_process import single_process
from nemo_dllm.connectors.adoption import Source, adopt_import, open_source
from nemo_dllm.connectors.build import build_on_cpu
from nemo_dllm.connectors.companions import FOLDER, SUMMARY_FILE, copy_companions
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.families.registry import find_family
from nemo_dllm.connectors.load import export_dtypes, export_hf_tensors, load_hf_weights
from nemo_dllm.connectors.nemo_tokenizer import nemo_tokenizer
from nemo_dllm.connectors.new_folder import name_full_disk, place_folder, refuse_existing, unfinished_sibling
from nemo_dllm.connectors.summary import TensorTally, conversion_summary
from nemo_dllm.connectors.vocabulary_growth import check_mask_init


def import_hf_checkpoint(
    model: DiffusionModel,
    hf_path: str | Path,
    output_path: str | Path,
    *,
    overwrite: bool = False,
    mask_init: str = "mean",
) -> Path:
    """Write a Hugging Face checkpoint as a NeMo checkpoint that trainings start from; whole or not at all.

    The checkpoint's model has the class, objective and layer choice of ``model`` and the sizes and dtype of the Hugging
    Face checkpoint; its vocabulary grows where a mask token is added that does not fit. Its context has the tokenizer,
    with the mask token, and the small files of the source. ``nemo_dllm_conversion.json`` says what was done. See
    :func:`adopt_import` for what ``model`` itself gets.

    Args:
        model: not built; its configuration must describe the checkpoint.
        hf_path: folder of the Hugging Face checkpoint.
        output_path: folder to make.
        overwrite: replace an existing folder.
        mask_init: of rows that the vocabulary grows by, see :class:`GrownCheckpoint`.

    Raises:
        FileExistsError: where ``output_path`` exists and ``overwrite`` is False.
        OSError: where ``output_path`` cannot be written to, or the disk is full.
        ValueError: where the model contradicts the checkpoint, there is no mask token, or ``output_path`` contains
            ``hf_path``; and as
            :func:`load_hf_weights` and :class:`HFCheckpoint`.
    """
    hf_path, output_path = Path(hf_path), Path(output_path)
    refuse_existing(output_path, overwrite, reads=(hf_path,))
    check_mask_init(mask_init)
    source = open_source(model, hf_path)
    unfinished = unfinished_sibling(output_path)
    companions = unfinished / "source" / FOLDER
    try:
        copy_companions(hf_path, companions, source.facts, source.mask_token)
        target = type(model)(
            hf_to_nemo_config(hf_path, vocab_size=source.vocab_size),
            replace(model.objective, mask_token_id=source.mask_token.id),
            tokenizer=nemo_tokenizer(companions, source.mask_token),
            transformer_impl=model.transformer_impl,
            attention_backend=model.attention_backend,
        )
        tally = _convert(target, source, unfinished, mask_init)
        if target.tokenizer is None:  # Else NeMo has copied them as the tokenizer's folder.
            shutil.copytree(companions, unfinished / "context" / FOLDER)
        shutil.rmtree(companions.parent)
        (unfinished / SUMMARY_FILE).write_bytes(_summary(source, tally, mask_init))
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        name_full_disk(error, output_path)
        raise
    place_folder(unfinished, output_path, overwrite)
    adopt_import(model, output_path)
    return output_path


def _convert(target: DiffusionModel, source: Source, nemo_path: Path, mask_init: str) -> TensorTally:
    """Save the weights and the context of the target as NeMo saves those of a training, without an optimizer."""
    trainer = nl.Trainer(
        devices=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        callbacks=[_SaveByMoving()],
        strategy=nl.MegatronStrategy(setup_optimizers=False, ckpt_save_optimizer=False, ckpt_async_save=False),
    )
    keep_write_results_in_process()
    trainer.strategy.connect(target)
    with single_process():
        trainer.strategy.setup_environment()
        build_on_cpu(target)
        load_hf_weights(target.module, source.checkpoint.path, mask_init=mask_init, keep_dtypes=True)
        tally = TensorTally(target.config)
        for _ in tally.watch(
            export_hf_tensors(target.module, dtypes=export_dtypes(target.module, source.facts.dtype_of))
        ):
            pass
        trainer.state.fn = TrainerFn.TESTING  # Fitting would allocate gradients.
        trainer.strategy.setup(trainer)
        trainer.state.fn = TrainerFn.FITTING  # Else nothing is saved.
        trainer.save_checkpoint(nemo_path)
        TrainerContext.from_trainer(trainer).io_dump(nemo_path / "context", yaml_attrs=["model"])
    return tally


class _SaveByMoving(pl.Callback):
    """Lets a save take the weights out of the model, instead of a copy of those that it writes in parts.

    Megatron writes gate and up projection apart, and copies all of them before it writes the first.
    """

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict) -> None:
        checkpoint["state_dict"] = {}  # It holds the weights too, and is not saved.
        state = trainer.strategy.megatron_parallel.sharded_state_dict()
        apply_factories(state)
        parts: dict[int, list[ShardedTensor]] = {}
        for value in nested_values(state):
            if isinstance(value, ShardedTensor) and value.data.untyped_storage().nbytes() != value.data.nbytes:
                parts.setdefault(value.data.untyped_storage().data_ptr(), []).append(value)
        for parameter in pl_module.parameters():
            for part in parts.get(parameter.untyped_storage().data_ptr(), ()):
                part.data = part.data.detach().clone()
            if parameter.untyped_storage().data_ptr() in parts:
                parameter.data = parameter.new_empty(0)
        checkpoint["sharded_state_dict"] = state


def _summary(source: Source, tally: TensorTally, mask_init: str) -> bytes:
    rows = source.vocab_size - find_family(source.checkpoint.config).vocab_size(source.checkpoint.config)
    return conversion_summary(
        "import",
        tally,
        source=source.facts.source,
        revision=source.facts.revision,
        family=source.facts.family,
        vocab_size=source.vocab_size,
        mask_token={"id": source.mask_token.id, "text": source.mask_token.text},
        added={
            "mask_token": source.mask_token.added,
            "vocabulary_rows": rows,
            "mask_init": mask_init if rows else None,
        },
    )
