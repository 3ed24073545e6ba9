"""Conversations as token ids, with a mask of the assistant's words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nemo_dllm.collections.diffusion.data.chat import Conversation
from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate, Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Changes whenever the same conversation and template would give other tokens or another mask.
ENCODER_VERSION = "1"


class EncodedChat(NamedTuple):
    """A conversation as ids up to the end of its last answer.

    ids: token ids.
    answer: per id, True for the assistant's words and the token that ends its turn.
    """

    ids: list[int]
    answer: list[bool]


class ChatEncoder:
    """Encodes conversations.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: of conversations; None is the tokenizer's own, with all turns of the assistant as answers.

    Raises:
        ValueError: the tokenizer has no end token, or there is no template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token to end an answer with; set one")
        self.tokenizer = tokenizer
        self.template = template or ChatTemplate(tokenizer)
        # A template writes its own begin token. Without one, there is one where the tokenizer puts one before a text.
        begin = [] if self.template.jinja else tokenizer("?")["input_ids"][:1]
        self._begin = begin if begin == [tokenizer.bos_token_id] else []

    def encode(self, conversation: Conversation) -> EncodedChat:
        """Encode one conversation up to the end of its last answer.

        Raises:
            ValueError: the place of the answers cannot be told exactly; says why.
        """
        [encoded] = self.encode_all([conversation])
        if isinstance(encoded, ValueError):
            raise encoded
        return encoded

    def encode_all(self, conversations: Sequence[Conversation]) -> list[EncodedChat | ValueError]:
        """Encode many at once, which is faster; an error stands in the place of what cannot be encoded."""
        rendered = [_value_or_error(self.template.render, conversation) for conversation in conversations]
        pieces = [[] if isinstance(text, ValueError) else _pieces(text) for text in rendered]
        texts = [text for of_one in pieces for text, _ in of_one]
        encoded = iter(self._ids(texts) if texts else [])
        ids = [[next(encoded) for _ in of_one] for of_one in pieces]
        return [
            text if isinstance(text, ValueError) else _value_or_error(self._join, text, of_one, ids_of_one)
            for text, of_one, ids_of_one in zip(rendered, pieces, ids, strict=True)
        ]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoded["input_ids"]

    def _join(self, rendered: Rendered, pieces: list[tuple[str, bool]], encoded: list[list[int]]) -> EncodedChat:
        *encoded, whole = encoded
        ids = [token for piece in encoded for token in piece]
        answer = [is_answer for piece, (_, is_answer) in zip(encoded, pieces, strict=False) for _ in piece]
        # Generation goes on from the prompt's own tokens, so where a token would reach across a border, both sides are
        # encoded apart, as long as this does not change the text (a tokenizer may put a space before each piece).
        if ids != whole and self.tokenizer.decode(ids) != self.tokenizer.decode(whole):
            ids, answer = whole, self._answer_by_offsets(rendered)
        if not any(answer):
            raise ValueError("the answer has no token")
        has_end = self.template.has_end(rendered.text)
        end = [] if has_end else [self.tokenizer.eos_token_id]
        return EncodedChat([*self._begin, *ids, *end], [*(False for _ in self._begin), *answer, *(True for _ in end)])

    def _answer_by_offsets(self, rendered: Rendered) -> list[bool]:
        text, spans = rendered
        if not self.tokenizer.is_fast:
            raise ValueError("the tokenizer changes the text at the border of an answer; use a fast tokenizer")
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        answer = []
        for start, stop in offsets["offset_mapping"]:
            words = [at for at in range(start, stop) if not text[at].isspace()] or [start]
            inside = {any(first <= at < last for first, last in spans) for at in words}
            if len(inside) > 1:
                raise ValueError(f"the token {text[start:stop]!r} reaches from a prompt into an answer")
            answer.append(inside == {True})
        return answer


def _pieces(rendered: Rendered) -> list[tuple[str, bool]]:
    """What lies between the borders of answers, and whether it is one; then the whole text."""
    text, spans = rendered
    borders = sorted({0, len(text), *(border for span in spans for border in span)})
    starts = {start for start, _ in spans}
    pieces = [(text[start:stop], start in starts) for start, stop in zip(borders, borders[1:], strict=False)]
    return [*pieces, (text, False)]


def _value_or_error(function, *arguments):
    try:
        return function(*arguments)
    except ValueError as error:
        return error
