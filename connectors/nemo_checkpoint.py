"""Hugging Face checkpoints to NeMo checkpoints and back, on one process, with or without CUDA."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from lightning.pytorch.trainer.states import TrainerFn
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.utils import unwrap_model
from nemo import lightning as nl
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.lightning import _strategy_lib, io
from nemo.lightning.io.pl import TrainerContext

from ..collections.diffusion import cpu
from ..collections.diffusion.models.model import DiffusionModel
from .checkpoint_files import (
    CONFIG_FILE,
    DEFAULT_SHARD_SIZE,
    HFCheckpoint,
    replace_folder,
    unfinished_sibling,
    write_hf_checkpoint,
)
from .companions import FOLDER, companion_files, copy_companions, read_origin
from .config import diffusion_hf_config, hf_to_nemo_config
from .facts import CheckpointFacts, read_facts
from .families import family_of, find_family
from .load import check_same_model, export_hf_tensors, load_hf_weights
from .mask_token import MaskToken, find_mask_token, load_hf_tokenizer, mask_token_at

# NeMo saves the Megatron model as a child of its own module.
_MODULE_PREFIX = "module."


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
    _refuse_existing(output_path, overwrite)
    checkpoint, facts = HFCheckpoint(hf_path), read_facts(hf_path)
    check_same_model(model.config, checkpoint, find_family(checkpoint.config))
    _check_same_shift(model.objective, facts)
    mask_token = _mask_token(model.objective, checkpoint)
    unfinished = unfinished_sibling(output_path)
    companions = unfinished / "source" / FOLDER
    try:
        copy_companions(hf_path, companions, facts)
        target = type(model)(
            hf_to_nemo_config(hf_path),
            replace(model.objective, mask_token_id=mask_token.id),
            tokenizer=_nemo_tokenizer(companions, mask_token),
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
        ValueError: where the checkpoint is no import, or of another family, or its logit shift another.
    """
    nemo_path = Path(nemo_path)
    origin = read_origin(nemo_path)
    if origin is None:
        raise ValueError(f"{nemo_path} is no import of a Hugging Face checkpoint; remove it or choose another folder")
    if origin.facts.family != family_of(model.config).name:
        raise ValueError(
            f"{nemo_path} is an import of family {origin.facts.family}, the model's configuration "
            f"{type(model.config).__name__} of family {family_of(model.config).name}"
        )
    _check_same_shift(model.objective, origin.facts)
    imported = io.load_context(nemo_path, subpath="model")
    if model.objective.mask_token_id is None:
        model.objective.mask_token_id = imported.objective.mask_token_id
    if imported.tokenizer is not None:
        model.tokenizer = imported.tokenizer
        model.__io__.tokenizer = imported.tokenizer.__io__


def export_hf_checkpoint(
    nemo_path: str | Path,
    output_path: str | Path,
    *,
    max_shard_size: int = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
) -> Path:
    """Write a NeMo checkpoint of a diffusion model as a Hugging Face checkpoint; whole or not at all.

    The tensors have the dtype in which the checkpoint holds them. What training started from gives config.json (see
    :func:`diffusion_hf_config`) and, byte for byte, tokenizer and generation settings; a model trained from scratch
    gets them from its configuration and tokenizer.

    Args:
        nemo_path: an import, or a checkpoint of any step of a training.
        output_path: folder to make.
        max_shard_size: bytes of tensors per file.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: where ``output_path`` exists and ``overwrite`` is False.
        FileNotFoundError, ValueError: where ``nemo_path`` is no NeMo checkpoint of a diffusion model.
    """
    nemo_path, output_path = Path(nemo_path), Path(output_path)
    _refuse_existing(output_path, overwrite)
    with loaded_checkpoint(nemo_path) as model:
        core = unwrap_model(model.module)
        origin = read_origin(nemo_path)
        if origin is not None and origin.facts.family != family_of(model.config).name:
            origin = None  # Only the tokenizer is of that checkpoint.
        config = diffusion_hf_config(
            model.config,
            model.objective,
            vocab_size=core.logical_vocab_size,
            dtype=next(core.parameters()).dtype,
            origin=origin,
        )
        files = _tokenizer_files(model.tokenizer) if origin is None else companion_files(nemo_path)
        if origin is None or config != origin.config:
            files.pop(CONFIG_FILE, None)
        return write_hf_checkpoint(
            output_path,
            config,
            export_hf_tensors(core),
            max_shard_size=max_shard_size,
            extra_files=files,
            overwrite=overwrite,
        )


@contextmanager
def loaded_checkpoint(nemo_path: str | Path) -> Iterator[DiffusionModel]:
    """The model of a NeMo checkpoint, with its weights, whole on the CPU, in the dtype of the checkpoint.

    Raises:
        FileNotFoundError: where there is no checkpoint.
        ValueError: for a Hugging Face checkpoint, and the checkpoint of another kind of model.
    """
    nemo_path = Path(nemo_path)
    if not (nemo_path / "context").is_dir():
        if (nemo_path / CONFIG_FILE).is_file():
            raise ValueError(f"{nemo_path} is a Hugging Face checkpoint; import it first (llm.import_ckpt)")
        raise FileNotFoundError(f"{nemo_path} is no NeMo checkpoint: it has no folder 'context'")
    model = io.load_context(nemo_path, subpath="model")
    if not isinstance(model, DiffusionModel):
        raise ValueError(f"{nemo_path} holds a {type(model).__name__}, not a diffusion model")
    dtype = _stored_dtype(nemo_path / "weights")
    model.config.params_dtype = dtype
    model.config.bf16 = model.config.fp16 = False  # No wrapper that casts inputs and outputs.
    with _one_process():
        _build_on_cpu(model)
        weights = str(nemo_path / "weights")
        metadata = dist_checkpointing.load_content_metadata(weights)
        state = model.module.sharded_state_dict(prefix=_MODULE_PREFIX, metadata=metadata)
        loaded = dist_checkpointing.load({"state_dict": state}, weights)["state_dict"]
        model.module.load_state_dict({name.removeprefix(_MODULE_PREFIX): value for name, value in loaded.items()})
        yield model


@contextmanager
def _one_process() -> Iterator[None]:
    """A process group of this process alone, unless there is one, and Megatron's parallel state on it."""
    cpu.enable_cpu_runtime()
    if parallel_state.is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if sizes != (1, 1):
            raise ValueError(
                f"checkpoints are converted on one process; here tensor and pipeline parallel sizes are {sizes}"
            )
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        store = torch.distributed.FileStore(f"{folder}/store", 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def _build_on_cpu(model: DiffusionModel) -> None:
    """Build the model with undefined weights: all are read from a checkpoint."""
    if not tensor_parallel.get_cuda_rng_tracker().is_initialized():
        tensor_parallel.model_parallel_cuda_manual_seed(model.objective.seed)
    model.config.perform_initialization = False
    with _strategy_lib.megatron_cpu_init_context(model.config):
        model.configure_model()


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
    trainer.strategy.connect(target)
    with _one_process():
        trainer.strategy.setup_environment()
        _build_on_cpu(target)
        load_hf_weights(target.module, hf_path)
        trainer.strategy.setup(trainer)
        trainer.save_checkpoint(nemo_path)
        TrainerContext.from_trainer(trainer).io_dump(nemo_path / "context", yaml_attrs=["model"])


def _stored_dtype(weights: Path) -> torch.dtype:
    tensors = dist_checkpointing.load_tensors_metadata(str(weights))
    return next(t.dtype for name, t in tensors.items() if name.endswith("word_embeddings.weight"))


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


def _nemo_tokenizer(folder: Path, mask_token: MaskToken) -> AutoTokenizer | None:
    hf_tokenizer = load_hf_tokenizer(folder)
    if hf_tokenizer is None:
        return None
    return AutoTokenizer(
        str(folder),
        mask_token=mask_token.text,
        # NeMo would empty this list.
        additional_special_tokens=list(hf_tokenizer.additional_special_tokens),
    )


def _tokenizer_files(tokenizer) -> dict[str, bytes]:
    if not isinstance(tokenizer, AutoTokenizer):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _refuse_existing(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists; choose another folder or pass overwrite=True")
