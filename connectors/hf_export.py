"""From a NeMo checkpoint of a diffusion model to a Hugging Face checkpoint."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.utils import unwrap_model
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from nemo.utils import logging
from torch import nn

from nemo_dllm.collections.diffusion.models.lora import add_adapters, merge_adapters
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.single_process import single_process
from nemo_dllm.connectors.base_model import base_of
from nemo_dllm.connectors.build import build_on_cpu, cast_parameters
from nemo_dllm.connectors.checkpoint_files import CONFIG_FILE, write_hf_checkpoint
from nemo_dllm.connectors.companions import SUMMARY_FILE, companion_files, origin_layout, read_origin, small_files
from nemo_dllm.connectors.config import Origin, diffusion_hf_config
from nemo_dllm.connectors.families.registry import family_of
from nemo_dllm.connectors.family import Family
from nemo_dllm.connectors.load import export_dtypes, export_hf_tensors, hf_tensor_headers
from nemo_dllm.connectors.mask_token import token_at
from nemo_dllm.connectors.model_context import damage_named, load_model_context
from nemo_dllm.connectors.new_folder import refuse_existing
from nemo_dllm.connectors.safetensors_writer import TensorHeader
from nemo_dllm.connectors.shard_layout import size_in_bytes
from nemo_dllm.connectors.summary import TensorTally, conversion_summary
from nemo_dllm.connectors.tensor_dtypes import main_dtype
from nemo_dllm.connectors.tied_head import repeat_head
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer, name_mask_token

# NeMo saves the Megatron model as a child of its own module.
_MODULE_PREFIX = "module."
_ADAPTER = ".adapter."


def export_hf_checkpoint(
    nemo_path: str | Path,
    output_path: str | Path,
    *,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a NeMo checkpoint of a diffusion model as a Hugging Face checkpoint; whole or not at all.

    The tensors have the dtype in which the checkpoint holds them, see :func:`exported_dtypes`. What training started
    from gives config.json (see :func:`diffusion_hf_config`) and, byte for byte, tokenizer and
    generation settings; a model trained from scratch gets them from its configuration and tokenizer.
    ``nemo_dllm_conversion.json`` says what was done.

    Args:
        nemo_path: an import, or a checkpoint of any step of a training.
        output_path: folder to make.
        max_shard_size: bytes of tensors per file, or text as ``5GB``; None keeps the files of what training started
            from, and is 5 GB where that has other tensors, or torch pickles.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: where ``output_path`` exists and ``overwrite`` is False.
        FileNotFoundError, ValueError: where ``nemo_path`` is no NeMo checkpoint of a diffusion model.
        ValueError: where ``output_path`` contains ``nemo_path``, and for a size that is none.
    """
    nemo_path, output_path = Path(nemo_path), Path(output_path)
    reads = (nemo_path,) if (base := base_of(nemo_path)) is None else (nemo_path, base)
    refuse_existing(output_path, overwrite, reads)
    largest = None if max_shard_size is None else size_in_bytes(max_shard_size)
    with loaded_checkpoint(nemo_path) as model:
        core = unwrap_model(model.module)
        origin = read_origin(nemo_path)
        if origin is not None and origin.facts.family != family_of(model.config).name:
            origin = None  # Only the tokenizer is of that checkpoint.
        dtypes = {} if origin is None else export_dtypes(core, origin.facts.dtype_of)
        headers, tensors = hf_tensor_headers(core, dtypes=dtypes), export_hf_tensors(core, dtypes=dtypes)
        if origin is not None and origin.facts.repeats_head:
            headers, tensors = repeat_head(family_of(model.config), model.config, headers, tensors)
        config, files = _config_and_files(nemo_path, model, headers, origin)
        tally = TensorTally(model.config)
        return write_hf_checkpoint(
            output_path,
            config,
            headers,
            tally.watch(tensors),
            layout=None if origin is None else origin_layout(nemo_path),
            max_shard_size=largest,
            extra_files=files,
            last_files=lambda: {SUMMARY_FILE: _summary(nemo_path, origin, model, core.logical_vocab_size, tally)},
            overwrite=overwrite,
        )


def _config_and_files(
    nemo_path: Path, model: DiffusionModel, headers: Mapping[str, TensorHeader], origin: Origin | None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Content of config.json, and of the other small files by name; config.json among them where it is the origin's."""
    config = diffusion_hf_config(
        model.config,
        model.objective,
        vocab_size=unwrap_model(model.module).logical_vocab_size,
        dtype=main_dtype(
            {name: header.dtype for name, header in headers.items()},
            {name: header.shape for name, header in headers.items()},
        ),
        origin=origin,
    )
    if origin is None:
        config |= _special_ids(model.tokenizer)
        files = _tokenizer_files(model.tokenizer, model.objective.mask_token_id, family_of(model.config))
    else:
        files = companion_files(nemo_path)
        if config != origin.config:
            del files[CONFIG_FILE]
    if origin is None or origin.facts.attention == "causal":
        files |= _modeling_files(family_of(model.config))
    return config, files


def _summary(
    nemo_path: Path, origin: Origin | None, model: DiffusionModel, vocab_size: int, tally: TensorTally
) -> bytes:
    mask_id = model.objective.mask_token_id
    tokenizer = getattr(model.tokenizer, "tokenizer", None)
    return conversion_summary(
        "export",
        tally,
        source=str(nemo_path),
        # Of what its training started from.
        revision=None if origin is None else origin.facts.revision,
        family=family_of(model.config).name,
        vocab_size=vocab_size,
        seq_length=model.config.seq_length,
        mask_token={"id": mask_id, "text": None if tokenizer is None else tokenizer.convert_ids_to_tokens(mask_id)},
        added={"mask_token": False, "vocabulary_rows": 0, "mask_init": None},
    )


@contextmanager
def loaded_checkpoint(nemo_path: str | Path) -> Iterator[DiffusionModel]:
    """As :func:`load_nemo_checkpoint`, each tensor as it is stored, on Megatron's parallel state of one process."""
    with single_process():
        yield load_nemo_checkpoint(nemo_path, as_stored=True)


def load_nemo_checkpoint(nemo_path: str | Path, *, as_stored: bool = False) -> DiffusionModel:
    """The model of a NeMo checkpoint, with its weights, whole on the CPU, in the dtype of the checkpoint.

    Adapters are merged into their base model, see :func:`base_of`.

    Args:
        nemo_path: the checkpoint.
        as_stored: leave each parameter the dtype in which it is stored; else all get that of the embedding.

    It needs ``single_process``, as long as the model is in use.

    Raises:
        FileNotFoundError: where there is no checkpoint.
        ValueError: for a Hugging Face checkpoint, a damaged one, and the checkpoint of another kind of model.
    """
    nemo_path = Path(nemo_path)
    model = load_model_context(nemo_path)
    weights = nemo_path / "weights"
    base = base_of(nemo_path)
    whole = weights if base is None else base / "weights"
    with damage_named(whole):
        dtype = _stored_dtype(whole)
    build_on_cpu(model, dtype=dtype)
    with damage_named(whole):
        _take_stored_dtypes(model.module, str(whole))
        _load_weights(model.module, str(whole))
    if base is not None:
        add_adapters(model.module, model.model_transform)
        with damage_named(weights):
            _load_weights(model.module, str(weights), only=_ADAPTER)
        merge_adapters(model.module)
    if not as_stored:
        cast_parameters(model.module, dtype)
    return model


def _load_weights(core: torch.nn.Module, weights: str, only: str = "") -> None:
    """Read a checkpoint into the parameters, those with ``only`` in their names.

    What Megatron stores in parts, as gate and up projection, it reads into new tensors, and merges into further ones.
    Here the parts are copied as they are, and let go before the next parameter's memory is touched.
    """
    state = {name: value for name, value in _sharded_state(core, weights).items() if only in name}
    targets = dict_list_map_outplace(lambda value: value.data, state)
    loaded = dist_checkpointing.load({"state_dict": state}, weights)["state_dict"]
    for name, target in targets.items():
        for part, value in zip(nested_values({0: target}), nested_values({0: loaded.pop(name)}), strict=True):
            if isinstance(value, torch.Tensor):
                part.detach().copy_(value)
            else:
                core.load_state_dict({name.removeprefix(_MODULE_PREFIX): value}, strict=False)


def _sharded_state(core: nn.Module, weights: str) -> dict[str, Any]:
    state = core.sharded_state_dict(prefix=_MODULE_PREFIX, metadata=dist_checkpointing.load_content_metadata(weights))
    apply_factories(state)
    return state


def _take_stored_dtypes(core: nn.Module, weights: str) -> None:
    """Give each parameter the dtype in which a checkpoint stores it."""
    stored = dist_checkpointing.load_tensors_metadata(weights)
    parameters = dict(core.named_parameters())
    for name, value in _sharded_state(core, weights).items():
        parameter = parameters.get(name.removeprefix(_MODULE_PREFIX))
        part = next((part for part in nested_values({0: value}) if isinstance(part, ShardedTensor)), None)
        if parameter is not None and part is not None and part.key in stored:
            parameter.data = parameter.data.to(stored[part.key].dtype)


def _stored_dtype(weights: Path) -> torch.dtype:
    tensors = dist_checkpointing.load_tensors_metadata(str(weights))
    return next(t.dtype for name, t in tensors.items() if name.endswith("word_embeddings.weight"))


def _tokenizer_files(tokenizer, mask_token_id: int, family: Family) -> dict[str, bytes]:
    """Files of a tokenizer, which name the mask token where they can, see :func:`name_mask_token`."""
    if not isinstance(tokenizer, AutoTokenizer):
        return {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer.tokenizer.save_pretrained(folder)
        files = {name: file.read_bytes() for name, file in small_files(folder).items()}
        try:
            name_mask_token(folder, token_at(mask_token_id, load_hf_tokenizer(folder), family), family.mask_token)
        except ValueError as error:  # Of a class that is code, say; the training must not be lost for it.
            logging.warning(f"the exported tokenizer does not name the mask token {mask_token_id}: {error}")
            return files
        return {name: file.read_bytes() for name, file in small_files(folder).items()}


def _modeling_files(family: Family) -> dict[str, bytes]:
    code = family.diffusion_class.code
    return {} if code is None else {code.file.name: code.file.read_bytes()}


def _special_ids(tokenizer) -> dict[str, int]:
    """Ids of the special tokens, under the names of config.json."""
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_id", None) for name in ("bos", "eos", "pad")}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}
