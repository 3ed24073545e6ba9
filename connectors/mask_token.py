"""Which token is the mask: the config's, the tokenizer's, or one that the tokenizer gets."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from nemo_dllm.connectors.family import Family


class MaskToken(NamedTuple):
    """A mask token; ``text`` is None where the tokenizer has no token of that id, both where there is no mask token."""

    id: int | None
    text: str | None
    added: bool = False
    """Whether the tokenizer's files lack it."""


def find_mask_token(
    tokenizer, hf: Mapping[str, Any], family: Family, generation: Mapping[str, Any] = MappingProxyType({})
) -> MaskToken:
    """The mask token of a checkpoint.

    In order: ``mask_token_id`` of config.json and of generation_config.json, the tokenizer's mask token, the family's
    mask token where the tokenizer has that text, and else that one as the next token to be added. An added token may
    lie beyond the embedding table, which then has to grow.

    Args:
        tokenizer: from :func:`load_hf_tokenizer`; it may get the token added.
        hf: content of config.json.
        family: the checkpoint's family.
        generation: content of generation_config.json.

    Raises:
        ValueError: where the mask token is the bos, eos, pad or unk token as well, a file names an id outside of the
            vocabulary, or the tokenizer's ids have a gap, in which it would count a new one.
    """
    for file, settings in (("config.json", hf), ("generation_config.json", generation)):
        named = settings.get("mask_token_id")
        if named is not None:
            last = family.vocab_size(hf) - 1
            if type(named) is not int:
                raise ValueError(f"mask_token_id={named!r} is no whole number; write the id of one token")
            if not 0 <= named <= last:
                raise ValueError(
                    f"{file} has mask_token_id={named}, outside the vocabulary of {last + 1}; write the id of the mask "
                    f"token there, from 0 to {last}"
                )
            return mask_token_at(named, tokenizer, hf, family)
    if tokenizer is None:
        return MaskToken(None, None)
    text, known = tokenizer.mask_token or family.mask_token, tokenizer.get_vocab()
    added = text not in known
    token_id = _added_id(tokenizer, text)
    if added and token_id in known.values():
        raise ValueError(
            f"the tokenizer would give {text!r} the id {token_id}, which another token has: its ids have gaps; set "
            "mask_token_id of the objective to the id of an unused token"
        )
    _check_unshared(token_id, tokenizer, hf)
    return MaskToken(token_id, text, added)


def mask_token_at(token_id: int, tokenizer, hf: Mapping[str, Any], family: Family) -> MaskToken:
    """The mask token of a given id, see :func:`token_at`; it may be one that text uses.

    Raises:
        ValueError: where the id is outside of the vocabulary, or that of the bos, eos, pad or unk token.
    """
    _check_unshared(token_id, tokenizer, hf)
    token = token_at(token_id, tokenizer, family)
    last = family.vocab_size(hf) - 1
    if token.text is None and not 0 <= token_id <= last:
        raise ValueError(
            f"mask_token_id={token_id} is outside the vocabulary of {last + 1}; choose an id from 0 to {last}, or "
            "leave it out (a recipe's own: null), which takes the checkpoint's mask token or adds one"
        )
    return token


def token_at(token_id: int, tokenizer, family: Family) -> MaskToken:
    """The token of a given id, as a tokenizer has it, or can get it.

    Its text is that of the tokenizer's token, or the family's mask token where the next token to be added has the id,
    and no other one the text. The tokenizer may get the token added.
    """
    known = {} if tokenizer is None else tokenizer.get_vocab()
    text = next((text for text, known_id in known.items() if known_id == token_id), None)
    can_add = text is None and tokenizer is not None and family.mask_token not in known
    if can_add and _added_id(tokenizer, family.mask_token) == token_id:
        return MaskToken(token_id, family.mask_token, added=True)
    return MaskToken(token_id, text)


def grown_vocab_size(hf: Mapping[str, Any], family: Family, mask_token: MaskToken) -> int:
    """Tokens of a checkpoint's model once it has a mask token: as many as before where that fits."""
    return max(family.vocab_size(hf), mask_token.id + 1)


def _added_id(tokenizer, text: str) -> int:
    """The id of a token, added where it is new; that of another one where the tokenizer's ids have a gap."""
    tokenizer.add_special_tokens({"mask_token": text})
    return tokenizer.convert_tokens_to_ids(text)


def _check_unshared(token_id: int, tokenizer, hf: Mapping[str, Any]) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        named = hf.get(name)
        if token_id in (getattr(tokenizer, name, None), *(named if isinstance(named, list) else [named])):
            raise ValueError(f"mask_token_id={token_id} is the {name} too; choose an unused token as the mask")
