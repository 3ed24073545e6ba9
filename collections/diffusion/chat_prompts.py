"""Conversations as prompts, by the chat template of the tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_dllm.collections.diffusion.characters import check_characters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Of Unicode's private use area, so in no template.
_PROBE = "\ue000"


class ChatTemplate:
    """Renders conversations, and knows what ends an answer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: Jinja text; None takes the tokenizer's own.

    Attributes:
        end_token_ids: the special token behind an answer, which need not be the tokenizer's end token.

    Raises:
        ValueError: the tokenizer has no template, and none is given.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None):
        if template is None and not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; start with --chat-template FILE (chat_template=FILE of `nemo "
                "dllm`), or continue texts instead"
            )
        self._tokenizer, self._template = tokenizer, template
        self.end_token_ids = self._find_end()

    def prompt(self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation, with the header of the next answer.

        Args:
            messages: turns with "role" and "content".
            variables: further ones of the template, such as ``enable_thinking``.

        Raises:
            ValueError: the template refuses the conversation, or a name is none of a variable of templates.
        """
        self.check_variables(variables)
        text = self._render(messages, add_generation_prompt=True, **variables)
        check_characters(text, "the conversation")
        return self._encode(text)

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Refuse names that mean something else to the tokenizer.

        Raises:
            ValueError: names them.
        """
        taken = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        if refused := sorted(taken & variables.keys()):
            raise ValueError(f"{', '.join(refused)} may not be set: only variables of the template itself may")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _render(self, messages: Sequence[Mapping[str, str]], **variables: Any) -> str:
        turns = [dict(message) for message in messages]
        try:
            return self._tokenizer.apply_chat_template(turns, chat_template=self._template, tokenize=False, **variables)
        except Exception as error:
            # Templates are programs, and fail as these do.
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    def _find_end(self) -> tuple[int, ...]:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, found, behind = self._render(turns).rpartition(_PROBE)
        except ValueError:
            return ()
        ids = self._encode(behind.lstrip()) if found else []
        special = {id for id, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        return tuple(id for id in ids[:1] if id in special)


def read_template(path: str | Path | None) -> str | None:
    """The Jinja text of a file; None stays None.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if path is None:
        return None
    if not Path(path).is_file():
        raise FileNotFoundError(f"chat_template={path} does not exist; name a file with a Jinja template")
    return Path(path).read_text(encoding="utf-8")
