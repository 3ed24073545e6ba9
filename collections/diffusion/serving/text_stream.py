"""Text of a growing row of tokens, in pieces that are never taken back."""

from collections.abc import Sequence

from nemo_dllm.collections.diffusion.sampling.stopping import Decode

# What tokenizers give for the bytes of a character that is not complete.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns the tokens of a completion into pieces of text; joined they are the text of all tokens.

    Held back until they are settled: bytes that make no character yet, and what may become a stop string.

    Args:
        decode: token ids -> text, without special tokens.
        context: the tokens before the completion, as far as they decide on white space between the two.
        stops: texts that end the completion, which does not include them.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = (), stops: Sequence[str] = ()):
        self._decode, self._context, self._stops = decode, list(context), tuple(stops)
        self._before = decode(self._context) if self._context else ""
        self._sent = ""

    def push(self, tokens: Sequence[int], *, last: bool) -> str:
        """The text that has become certain.

        Args:
            tokens: all of the completion so far.
            last: whether these are all.
        """
        text = self.text(tokens)
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            text = text[: min(found)]
        elif not last:
            text = self._certain(text)
        if not text.startswith(self._sent):
            return ""
        piece = text[len(self._sent) :]
        self._sent = text
        return piece

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens behind the context, stops included."""
        whole = self._decode([*self._context, *tokens])
        return whole[len(self._before) :] if whole.startswith(self._before) else self._decode(list(tokens))

    def _certain(self, text: str) -> str:
        text = text.rstrip(_INCOMPLETE)
        # No stop begins in what has been sent, or that would have been held back; none is longer than the longest.
        longest = max(map(len, self._stops), default=0)
        for start in range(max(len(self._sent), len(text) - longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return text[:start]
        return text
