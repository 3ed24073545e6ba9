"""Which token is the mask: the config's, the tokenizer's, or one that the tokenizer gets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nemo_dllm.connectors.family import Family

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class MaskToken(NamedTuple):
    """A mask token; ``text`` is None where the tokenizer has no token of that id, both where there is no mask token."""

    id: int | None
    text: str | None


def load_hf_tokenizer(folder: str | Path):
    """The transformers tokenizer of a checkpoint folder; None where the folder has no tokenizer files."""
    if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def find_mask_token(tokenizer, hf: Mapping[str, Any], family: Family) -> MaskToken:
    """The mask token of a checkpoint.

    In order: ``mask_token_id`` of config.json, the tokenizer's mask token, the family's mask token where the tokenizer
    has that text, and else as the next token to be added, provided that the vocabulary has a row for it.

    Args:
        tokenizer: from :func:`load_hf_tokenizer`; it may get the token added.
        hf: content of config.json.
        family: the checkpoint's family.

    Raises:
        ValueError: where the mask token is the bos, eos, pad or unk token as well.
    """
    if hf.get("mask_token_id") is not None:
        return mask_token_at(hf["mask_token_id"], tokenizer, hf, family)
    if tokenizer is None:
        return MaskToken(None, None)
    text = tokenizer.mask_token or family.mask_token
    token_id = _added_id(tokenizer, text)
    if token_id >= hf["vocab_size"]:
        return MaskToken(None, None)
    _check_unshared(token_id, tokenizer, hf)
    return MaskToken(token_id, text)


def mask_token_at(token_id: int, tokenizer, hf: Mapping[str, Any], family: Family) -> MaskToken:
    """The mask token of a given id, with the text that the tokenizer has or may get for it.

    Raises:
        ValueError: where the id is outside of the vocabulary, or that of the bos, eos, pad or unk token.
    """
    if not 0 <= token_id < hf["vocab_size"]:
        raise ValueError(
            f"mask_token_id={token_id} is outside the vocabulary of {hf['vocab_size']}; choose an id in it"
        )
    _check_unshared(token_id, tokenizer, hf)
    if tokenizer is None:
        return MaskToken(token_id, None)
    text = next((text for text, known_id in tokenizer.get_vocab().items() if known_id == token_id), None)
    if text is None and _added_id(tokenizer, family.mask_token) == token_id:
        text = family.mask_token
    return MaskToken(token_id, text)


def _added_id(tokenizer, text: str) -> int:
    """The id of a token, added where it is new: where the id range has gaps only the tokenizer knows the next one."""
    tokenizer.add_special_tokens({"mask_token": text})
    return tokenizer.convert_tokens_to_ids(text)


def _check_unshared(token_id: int, tokenizer, hf: Mapping[str, Any]) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        named = hf.get(name)
        if token_id in (getattr(tokenizer, name, None), *(named if isinstance(named, list) else [named])):
            raise ValueError(f"mask_token_id={token_id} is the {name} too; choose an unused token as the mask")
