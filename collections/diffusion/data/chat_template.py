"""Conversations as text, with the exact places of the assistant's words, whatever the chat template does.

Where a template marks them (``{% generation %}``), its marks count. Elsewhere a turn's words are what changes when the
turn is replaced by a character that no text has, checked against the words themselves.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nemo_dllm.collections.diffusion.data.chat import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOSS_TURNS = ("all", "last")

# Unicode's private use area: some texts have some of it, none has all.
_PRIVATE = range(0xE000, 0xF900)
_QUESTION = Conversation([{"role": "user", "content": "?"}])
_SPACE = re.compile(r"\s+")
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A conversation as text, with its answers as sorted spans of characters [start, stop)."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """Renders conversations, and tells where the answers are.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: Jinja text, or the path of a file with it; None takes the tokenizer's own. The empty text joins
            prompt and answer as they stand, for conversations of two turns.
        loss_turns: "all" of the assistant's turns are answers, or only the "last".
        template_arguments: further variables of the template, e.g. {"enable_thinking": False}.

    Raises:
        ValueError: `loss_turns` is unknown, there is no template, or it is not Jinja.
        FileNotFoundError: `chat_template` is the path of a file that does not exist.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template: str | Path | None = None,
        loss_turns: str = "all",
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if loss_turns not in LOSS_TURNS:
            raise ValueError(f"loss_turns={loss_turns!r} is unknown; known: {', '.join(LOSS_TURNS)}")
        self.tokenizer = tokenizer
        self.loss_turns = loss_turns
        self.template_arguments = dict(template_arguments or {})
        self.jinja = _read_template(tokenizer, chat_template)
        # Not the added tokens that are ordinary text, such as those around thoughts and calls of tools.
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special_tokens = tuple({*added, *tokenizer.all_special_tokens})
        longest_first = sorted(self._special_tokens, key=len, reverse=True)
        # White space between the words and the token that ends the turn has to be generated too.
        self._turn_end = re.compile(rf"\s*(?:{'|'.join(map(re.escape, longest_first))})")
        self._check_syntax()

    def render(self, conversation: Conversation) -> Rendered:
        """The conversation up to the end of its last answer, with a span per answer, its end token included.

        Raises:
            ValueError: the place of the answers cannot be told exactly; says why.
        """
        if self.jinja == "":
            text, spans = _join_plainly(conversation)
        elif _MARKED.search(self.jinja):
            text, spans = self._render_marked(conversation)
        else:
            text = self._render(conversation)
            spans = [self._turn_span(conversation, turn, text) for turn in conversation.assistant_turns()]
        if self.jinja:
            spans = [(start, self._include_turn_end(text, stop)) for start, stop in spans]
        if self.loss_turns == "last":
            spans = spans[-1:]
        return Rendered(text[: spans[-1][1]], spans)

    def has_end(self, text: str) -> bool:
        """Whether a text of this template ends with a special token."""
        return self.jinja != "" and text.rstrip().endswith(self._special_tokens)

    def _check_syntax(self) -> None:
        """A template that no row can pass is not a matter of rows."""
        from jinja2 import TemplateSyntaxError

        try:
            self._render(_QUESTION)
        except ValueError as error:
            if isinstance(error.__cause__, TemplateSyntaxError):
                cause = error.__cause__
                raise ValueError(f"the chat template is not Jinja: {cause.message} in line {cause.lineno}") from cause

    def _render(self, conversation: Conversation, **arguments: Any) -> str:
        return self._render_template(conversation, **arguments)[0][0]

    def _render_template(self, conversation: Conversation, **arguments: Any) -> tuple[list[str], list]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            return render_jinja_template(
                conversations=[conversation.messages],
                tools=conversation.tools,
                chat_template=self.jinja,
                **{**self.tokenizer.special_tokens_map, **self.template_arguments, **arguments},
            )
        except Exception as error:  # The template is a program of its author's.
            raise ValueError(f"the chat template fails: {error}") from error

    def _render_marked(self, conversation: Conversation) -> Rendered:
        rendered, indices = self._render_template(conversation, return_assistant_tokens_mask=True)
        spans: list[tuple[int, int]] = []
        for start, stop in indices[0]:
            if spans and spans[-1][1] == start:
                start = spans.pop()[0]
            if stop > start:
                spans.append((start, stop))
        num_turns = len(conversation.assistant_turns())
        if len(spans) != num_turns:
            raise ValueError(f"the chat template marks {len(spans)} generations in {num_turns} turns of the assistant")
        return Rendered(rendered[0], spans)

    def _turn_span(self, conversation: Conversation, turn: int, text: str) -> tuple[int, int]:
        """Characters of `text` that are the words of one turn."""
        message = conversation.messages[turn]
        probe = next(chr(code) for code in _PRIVATE if chr(code) not in text)
        replaced = {"role": message["role"], "content": probe}
        messages = [*conversation.messages[:turn], replaced, *conversation.messages[turn + 1 :]]
        before, *after = self._render(conversation._replace(messages=messages)).split(probe)
        if len(after) != 1:
            raise ValueError(f"the chat template shows turn {turn} {len(after)} times")
        inserted = self._inserted_after_header(before)
        start, stop = len(before) - len(inserted), len(text) - len(after[0])
        if start > stop or text[:start] != before[:start] or text[stop:] != after[0]:
            raise ValueError(
                f"the chat template renders the rest of the conversation otherwise because of turn {turn}; "
                "mark the answers in it with {% generation %}"
            )
        if text.startswith(inserted, start) and _are_words_of(text[start + len(inserted) : stop], message):
            return start + len(inserted), stop
        if _are_words_of(text[start:stop], message):
            return start, stop
        raise ValueError(
            f"the chat template makes {text[start:stop][:40]!r} of turn {turn}; mark the answers in it with "
            "{% generation %}"
        )

    def _inserted_after_header(self, before: str) -> str:
        """What the template itself puts between the prompt for generation and the words, such as empty thoughts."""
        at = before.rfind(self._generation_header)
        inserted = before[at + len(self._generation_header) :]
        holds_turns = any(token in inserted for token in self._special_tokens if token in self._generation_header)
        return "" if at < 0 or holds_turns or not self._generation_header else inserted

    @functools.cached_property
    def _generation_header(self) -> str:
        """The prompt for a turn of the assistant, without what `template_arguments` add; empty if there is none."""
        bare = ChatTemplate(self.tokenizer, self.jinja)
        try:
            plain, prompt = bare._render(_QUESTION), bare._render(_QUESTION, add_generation_prompt=True)
        except ValueError:  # a template that needs more than a question
            return ""
        return prompt.removeprefix(plain) if prompt.startswith(plain) else ""

    def _include_turn_end(self, text: str, stop: int) -> int:
        match = self._turn_end.match(text, stop)
        return match.end() if match and not self.has_end(text[:stop]) else stop


def _read_template(tokenizer: "PreTrainedTokenizerBase", chat_template: str | Path | None) -> str:
    if chat_template == "":
        return ""
    # A template of one line without any braces can only be meant as a path.
    if isinstance(chat_template, Path) or (chat_template and "{" not in chat_template):
        if not Path(chat_template).is_file():
            raise FileNotFoundError(f"chat_template='{chat_template}' is neither a file nor a Jinja template")
        chat_template = Path(chat_template).read_text()
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template; pass chat_template (Jinja text or a file), or chat_template='' to "
            "join prompt and answer as they stand"
        )
    return tokenizer.get_chat_template(chat_template)


def _join_plainly(conversation: Conversation) -> Rendered:
    roles = [message["role"] for message in conversation.messages]
    if roles != ["user", "assistant"]:
        raise ValueError(f"chat_template='' joins a prompt and an answer, but the turns are {', '.join(roles)}")
    prompt, answer = (message["content"] for message in conversation.messages)
    return Rendered(prompt + answer, [(len(prompt), len(prompt) + len(answer))])


def _are_words_of(shown: str, message: Mapping[str, Any]) -> bool:
    """Whether the template shows the message itself: whole or without its beginning (thoughts), spaced as it likes.

    Calls of tools and thoughts in a field of their own are rendered by the template, around the words.
    """
    shown, content = (_SPACE.sub("", words) for words in (shown, message["content"]))
    thoughts = _SPACE.sub("", message.get("reasoning_content") or "")
    if message.get("tool_calls"):
        return bool(shown) and content in shown
    if thoughts and thoughts in shown:
        return shown.endswith(content)
    return bool(shown) and content.endswith(shown)
