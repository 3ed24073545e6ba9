"""Text of token ids, as it is for people: without special tokens, and the same for a text that grows."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextDecoder:
    """Decodes token ids; servers do so for every row that has grown, so that it must be quick.

    Left out are all tokens that the tokenizer's files call special, named roles (``eos_token``, ...) or not. NeMo's own
    ``ids_to_text`` leaves out those with a role, and gathers their names again for each token of a text, which takes
    forty times as long.

    Args:
        tokenizer: NeMo's; what it wraps decides where that is Hugging Face's.
    """

    def __init__(self, tokenizer: TokenizerSpec):
        self._tokenizer = tokenizer
        wrapped = getattr(tokenizer, "tokenizer", None)
        self._wrapped = wrapped if hasattr(wrapped, "added_tokens_decoder") else None
        self._special: frozenset[int] = frozenset()
        self._byte_of: dict[int, int] = {}
        if self._wrapped is not None:
            named = (id for id, token in wrapped.added_tokens_decoder.items() if token.special)
            self._special = frozenset([*wrapped.all_special_ids, *named])
            self._byte_of = _byte_tokens(wrapped)
        self._token_of = {byte: id for id, byte in self._byte_of.items()}

    def __call__(self, token_ids: Sequence[int]) -> str:
        """The text.

        Args:
            token_ids: in the vocabulary.
        """
        if self._wrapped is None:
            return self._tokenizer.ids_to_text(list(token_ids))
        shown = [id for id in token_ids if id not in self._special]
        return _decode(self._wrapped, self._with_whole_characters(shown))

    def _with_whole_characters(self, token_ids: list[int]) -> list[int]:
        """The tokens, with those of U+FFFD in place of bytes that make no character.

        Tokenizers decode a run of byte tokens as a whole, and one byte that fits nowhere makes U+FFFD of all of its
        characters. A text that grows would take back what it has said.
        """
        if self._byte_of.keys().isdisjoint(token_ids):
            return token_ids
        result = []
        for is_spelled, run in groupby(token_ids, key=self._byte_of.__contains__):
            if is_spelled:
                text = bytes(self._byte_of[id] for id in run).decode(errors="replace")
                run = (self._token_of[byte] for byte in text.encode())
            result += run
        return result


def _byte_tokens(tokenizer: Any) -> dict[int, int]:
    """Bytes by token, of a tokenizer that spells in them what its vocabulary lacks, such as LLaMA 2's; else empty."""
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in range(256)]
    if None in ids or len(set(ids)) < 256:
        return {}
    # Where these are tokens as any other, they are text.
    spells = _decode(tokenizer, [ids[byte] for byte in _REPLACEMENT.encode()]) == _REPLACEMENT
    return {id: byte for byte, id in enumerate(ids)} if spells else {}


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    # As they are written; tokenizers in Python put spaces around added tokens.
    return tokenizer.decode(token_ids, clean_up_tokenization_spaces=False, spaces_between_special_tokens=False)
