"""From a Hugging Face checkpoint to a NeMo checkpoint that trainings start from."""

import shutil
from dataclasses import replace
from pathlib import Path

from lightning.pytorch.trainer.states import TrainerFn
from nemo import lightning as nl
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.lightning import io
from nemo.lightning.io.pl import TrainerContext

from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.models.saving import keep_write_results_in_process
from nemo_dllm.collections.diffusion.single_process import single_process
from nemo_dllm.connectors.build import build_on_cpu
from nemo_dllm.connectors.checkpoint_files import HFCheckpoint, refuse_existing, replace_folder, unfinished_sibling
from nemo_dllm.connectors.companions import FOLDER, copy_companions, read_origin
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.facts import CheckpointFacts, read_facts
from nemo_dllm.connectors.families import find_family
from nemo_dllm.connectors.load import check_same_model, load_hf_weights
from nemo_dllm.connectors.mask_token import MaskToken, find_mask_token, load_hf_tokenizer, mask_token_at


def import_hf_checkpoint(
    model: DiffusionModel, hf_path: str | Path, output_path: str | Path, *, overwrite: bool = False
) -> Path:
    """Write a Hugging Face checkpoint as a NeMo checkpoint that trainings start from; whole or not at all.

    The checkpoint's model has the class, objective and layer choice of ``model`` and the sizes and dtype of the Hugging
    Face checkpoint. Its context has the tokenizer, with the mask token, and the small files of the source. See
    :func:`adopt_import` for what ``model`` itself gets.

    Args:
        model: not built; its configuration must describe the checkpoint.
        hf_path: folder of the Hugging Face checkpoint.
        output_path: folder to make.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: where ``output_path`` exists and ``overwrite`` is False.
        ValueError: where the model contradicts the checkpoint, or there is no mask token; and as
            :func:`load_hf_weights` and :class:`HFCheckpoint`.
    """
    hf_path, output_path = Path(hf_path), Path(output_path)
    refuse_existing(output_path, overwrite)
    checkpoint, facts = HFCheckpoint(hf_path), read_facts(hf_path)
    check_same_model(model.config, checkpoint.config, where=hf_path)
    _check_same_shift(model.objective, facts)
    mask_token = _mask_token(model.objective, checkpoint)
    unfinished = unfinished_sibling(output_path)
    companions = unfinished / "source" / FOLDER
    try:
        copy_companions(hf_path, companions, facts)
        target = type(model)(
            hf_to_nemo_config(hf_path),
            replace(model.objective, mask_token_id=mask_token.id),
            tokenizer=nemo_tokenizer(companions, mask_token),
            transformer_impl=model.transformer_impl,
            attention_backend=model.attention_backend,
        )
        _convert(target, hf_path, unfinished)
        if target.tokenizer is None:  # Else NeMo has copied them as the tokenizer's folder.
            shutil.copytree(companions, unfinished / "context" / FOLDER)
        shutil.rmtree(companions.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    replace_folder(unfinished, output_path)
    adopt_import(model, output_path)
    return output_path


def adopt_import(model: DiffusionModel, nemo_path: str | Path) -> None:
    """Give a model the tokenizer of an imported checkpoint, and its mask token where the objective names none.

    Raises:
        ValueError: where the checkpoint is no import, or of another model, or its logit shift another.
    """
    nemo_path = Path(nemo_path)
    origin = read_origin(nemo_path)
    if origin is None:
        raise ValueError(f"{nemo_path} is no import of a Hugging Face checkpoint; remove it or choose another folder")
    check_same_model(model.config, origin.config, where=nemo_path)
    _check_same_shift(model.objective, origin.facts)
    imported = io.load_context(nemo_path, subpath="model")
    if model.objective.mask_token_id is None:
        # In what was built, and in what its checkpoints say.
        for objective in (model.objective, model.__io__.objective):
            objective.mask_token_id = imported.objective.mask_token_id
    if imported.tokenizer is not None:
        model.tokenizer = imported.tokenizer
        model.__io__.tokenizer = imported.tokenizer.__io__


def _convert(target: DiffusionModel, hf_path: Path, nemo_path: Path) -> None:
    """Save the weights and the context of the target as NeMo saves those of a training, without an optimizer."""
    trainer = nl.Trainer(
        devices=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        strategy=nl.MegatronStrategy(setup_optimizers=False, ckpt_save_optimizer=False, ckpt_async_save=False),
    )
    trainer.state.fn = TrainerFn.FITTING  # Else nothing is saved.
    keep_write_results_in_process()
    trainer.strategy.connect(target)
    with single_process():
        trainer.strategy.setup_environment()
        build_on_cpu(target)
        load_hf_weights(target.module, hf_path)
        trainer.strategy.setup(trainer)
        trainer.save_checkpoint(nemo_path)
        TrainerContext.from_trainer(trainer).io_dump(nemo_path / "context", yaml_attrs=["model"])


def _mask_token(objective, checkpoint: HFCheckpoint) -> MaskToken:
    hf = checkpoint.config
    family, tokenizer = find_family(hf), load_hf_tokenizer(checkpoint.path)
    if objective.mask_token_id is not None:
        return mask_token_at(objective.mask_token_id, tokenizer, hf, family)
    found = find_mask_token(tokenizer, hf, family)
    if found.id is None:
        raise ValueError(
            f"{checkpoint.path} has no mask token, and its vocabulary of {hf['vocab_size']} no room for "
            f"{family.mask_token!r}; set mask_token_id of the objective to the id of an unused token"
        )
    return found


def _check_same_shift(objective, facts: CheckpointFacts) -> None:
    """A model that began autoregressive may be trained either way; a diffusion model has one already."""
    if facts.attention != "causal" and objective.right_shift != facts.right_shift:
        raise ValueError(
            f"right_shift={objective.right_shift} of the objective contradicts {facts.source}, a diffusion model "
            f"trained with right_shift={facts.right_shift}; set it to that"
        )


def nemo_tokenizer(folder: Path, mask_token: MaskToken) -> AutoTokenizer | None:
    """NeMo's tokenizer of a Hugging Face checkpoint, with the mask token; None where the folder has no tokenizer."""
    hf_tokenizer = load_hf_tokenizer(folder)
    if hf_tokenizer is None:
        return None
    return AutoTokenizer(
        str(folder),
        mask_token=mask_token.text,
        # NeMo would empty this list.
        additional_special_tokens=list(hf_tokenizer.additional_special_tokens),
    )
