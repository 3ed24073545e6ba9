"""Tokenizers of checkpoint folders: loaded without running their code, and given a mask token in their files."""

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo.utils import logging

from nemo_dllm.connectors.json_files import read_json_object
from nemo_dllm.connectors.mask_token import MaskToken

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TOKENIZER_FILES = (TOKENIZER_JSON, TOKENIZER_CONFIG, "tokenizer.model", "vocab.json")

# Classes that checkpoints bring as code and that split text as these of transformers do.
_SAME_AS = {"DreamTokenizer": "Qwen2Tokenizer"}

_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def load_hf_tokenizer(folder: str | Path):
    """The transformers tokenizer of a checkpoint folder; None where the folder has no tokenizer files.

    Code in the folder never runs. A tokenizer that is published as code, or of a class that the installed transformers
    lacks, is read from its tokenizer.json, or by the class of transformers that does the same.

    Raises:
        ValueError: where there is neither, or files are damaged.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    import transformers

    # Not all of them are read here, but damage is to be known before anything is copied.
    config, *_ = (_read(folder / name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS))
    name = config.get("tokenizer_class")
    if "auto_map" not in config and not _is_unknown(name):
        return _loaded(transformers.AutoTokenizer, folder)
    if (folder / TOKENIZER_JSON).is_file():
        return _loaded(transformers.PreTrainedTokenizerFast, folder)
    if name in _SAME_AS:
        return _loaded(getattr(transformers, _SAME_AS[name]), folder)
    what = "code of the checkpoint" if "auto_map" in config else "of a class that transformers lacks"
    raise ValueError(
        f"the tokenizer of {folder} is {what} ({name}), which is never run, and there is no "
        f"{TOKENIZER_JSON}; save the tokenizer with one (tokenizer.backend_tokenizer.save) and try again"
    )


def _loaded(tokenizer_class: type, folder: Path):
    if not (folder / TOKENIZER_JSON).is_file() and (folder / "tokenizer.model").is_file():
        _make_sentencepiece_models_readable()
    config = _read(folder / TOKENIZER_CONFIG)
    try:
        return tokenizer_class.from_pretrained(str(folder), trust_remote_code=False, **_as_transformers_4(config))
    except Exception as error:  # Damaged files raise anything, tokenizers' own Exception among them.
        for name in (TOKENIZER_JSON, "vocab.json"):
            _read(folder / name)
        raise ValueError(f"the tokenizer files of {folder} cannot be read ({error}); fetch them again") from error


def _is_unknown(name: Any) -> bool:
    """Whether the installed transformers lacks a class: version 5 saves most as ``TokenizersBackend``."""
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    return isinstance(name, str) and tokenizer_class_from_name(name) is None


def _as_transformers_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of tokenizer_config.json in the spelling of version 4, which 5 reads too, where 5 has its own."""
    extra = config.get("extra_special_tokens")
    return {"additional_special_tokens": extra, "extra_special_tokens": {}} if isinstance(extra, list) else {}


def _make_sentencepiece_models_readable() -> None:
    """Give transformers its own description of the files where that of sentencepiece is too new for protobuf."""
    name = "sentencepiece.sentencepiece_model_pb2"
    try:
        importlib.import_module(name)
    except ImportError:
        return
    except Exception:  # protobuf's VersionError.
        package, own = sys.modules["sentencepiece"], "transformers.utils.sentencepiece_model_pb2_new"
        package.sentencepiece_model_pb2 = sys.modules[name] = importlib.import_module(own)


def is_special(tokenizer, token_id: int) -> bool:
    """Whether a tokenizer knows a token as a special one, which text does not use."""
    known = tokenizer.added_tokens_decoder.get(token_id)
    return known is not None and known.special


def name_mask_token(folder: Path, mask_token: MaskToken, usual_text: str) -> None:
    """Let the tokenizer files of a folder name a model's mask token: a special one that they have, or a new one.

    A token that text uses stays text, and an id that the tokenizer neither has nor gives next cannot be named. Where it
    has another mask token then, that is said: programs ask either the tokenizer or config.json.

    Args:
        folder: of the files; without any, nothing happens.
        mask_token: the model's.
        usual_text: of mask tokens in this family.

    Raises:
        ValueError: see :func:`write_mask_token`.
    """
    tokenizer = load_hf_tokenizer(folder)
    if tokenizer is None or tokenizer.mask_token_id == mask_token.id:
        return
    if mask_token.added or is_special(tokenizer, mask_token.id):
        write_mask_token(folder, mask_token)
        return
    text = usual_text if tokenizer.mask_token_id is None else tokenizer.mask_token
    other = tokenizer.get_vocab().get(text)
    if other is not None:
        logging.warning(
            f"the model's mask token is {mask_token.id}, and its tokenizer has {text!r} as token {other}, which is "
            "none for this model; take mask_token_id from config.json, not from the tokenizer"
        )


def write_mask_token(folder: Path, mask_token: MaskToken) -> None:
    """Make a token the mask token of the tokenizer files of a folder, added where it is new; all else stays.

    Where they leave their class to the ``model_type`` of config.json, which conversions change, or name one that
    transformers 4 lacks, they name one then that every version has.

    Raises:
        ValueError: where a tokenizer loaded from the files would not have it under its id.
    """
    token = {"content": mask_token.text, **_PLAIN}
    tokenizer_json = _read(folder / TOKENIZER_JSON)
    if tokenizer_json and mask_token.added:
        tokenizer_json["added_tokens"] = [
            *tokenizer_json.get("added_tokens", ()),
            {"id": mask_token.id, **token, "special": True},
        ]
        _write(folder / TOKENIZER_JSON, tokenizer_json)
    config = _read(folder / TOKENIZER_CONFIG)
    config |= _as_transformers_4(config)
    if "tokenizer_class" not in config or _is_unknown(config["tokenizer_class"]):
        config["tokenizer_class"] = type(load_hf_tokenizer(folder)).__name__
    config["mask_token"] = mask_token.text
    if mask_token.added and "added_tokens_decoder" in config:
        config["added_tokens_decoder"][str(mask_token.id)] = token | {"special": True}
    elif mask_token.added and not tokenizer_json:
        _write(folder / ADDED_TOKENS, _read(folder / ADDED_TOKENS) | {mask_token.text: mask_token.id})
    _write(folder / TOKENIZER_CONFIG, config)
    if (folder / SPECIAL_TOKENS_MAP).is_file():
        known = _read(folder / SPECIAL_TOKENS_MAP)
        in_full = any(isinstance(value, dict) for value in known.values())
        _write(folder / SPECIAL_TOKENS_MAP, known | {"mask_token": token if in_full else mask_token.text})
    loaded = load_hf_tokenizer(folder)
    if (loaded.mask_token, loaded.mask_token_id) != (mask_token.text, mask_token.id):
        raise ValueError(
            f"the tokenizer cannot take {mask_token.text!r} as token {mask_token.id} (it became "
            f"{loaded.mask_token_id}); add the token with transformers and save the tokenizer"
        )


def _read(file: Path) -> dict[str, Any]:
    return read_json_object(file) if file.is_file() else {}


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
