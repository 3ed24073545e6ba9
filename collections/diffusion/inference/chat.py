"""Conversations with a model."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_dllm.collections.diffusion.inference.load import LoadedModel
from nemo_dllm.collections.diffusion.inference.prompts import read_utf8
from nemo_dllm.collections.diffusion.inference.session import Session, open_session
from nemo_dllm.collections.diffusion.inference.text import printable
from nemo_dllm.collections.diffusion.sampling import generate_stream, generation_result

RESET, QUIT = "/reset", "/quit"


class Chat:
    """A conversation in the model's chat template.

    Args:
        session: the model and its settings.
        system: what the model is told beforehand; None is nothing.
        chat_template: Jinja text; None is the tokenizer's own.

    Raises:
        ValueError: there is no tokenizer, or no chat template.
    """

    def __init__(self, session: Session, system: str | None = None, chat_template: str | None = None):
        if session.model.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, so there is no chat")
        self._tokenizer = session.model.tokenizer.tokenizer
        if chat_template is None and getattr(self._tokenizer, "chat_template", None) is None:
            raise ValueError("the tokenizer has no chat template; give chat_template, a file with one")
        self._template = chat_template
        ends = turn_end_ids(session.model, chat_template)
        config = replace(session.config, stop_token_ids=(*session.config.stop_token_ids, *ends))
        self._session = replace(session, config=config)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._system)

    def reset(self) -> None:
        """Start anew."""
        self.messages = list(self._system)

    def answer(self, text: str) -> str:
        """Say something, and get the answer; both are kept.

        Raises:
            ValueError: the conversation has become too long for the model; nothing is kept.
        """
        session, model = self._session, self._session.model
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = render(self._tokenizer, messages, self._template)
        session.check_length(f"the conversation ({RESET} starts anew)", len(tokens))
        config = replace(session.config, max_length=min(model.seq_length, session.config.max_length or sys.maxsize))
        steps = generate_stream(model.denoiser, [tokens], config, decode=model.decode, **session.canvas())
        last = session.follow(steps, start=len(tokens))
        completion = generation_result(last, [tokens], config, model.decode).completions[0]
        said = model.decode(completion.tolist()).strip()
        self.messages = [*messages, {"role": "assistant", "content": said}]
        return said


def render(tokenizer, messages: list[dict[str, str]], chat_template: str | None = None) -> list[int]:
    """Token ids of a conversation, up to where the next answer begins.

    Raises:
        ValueError: the chat template does not take the messages.
    """
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, chat_template=chat_template, return_dict=False
        )
    except TemplateError as error:
        raise ValueError(f"the chat template fails: {error}") from error


def turn_end_ids(model: LoadedModel, chat_template: str | None = None) -> tuple[int, ...]:
    """The token with which the chat template ends an answer; nothing where that cannot be told."""
    from nemo_dllm.collections.diffusion.data.chat import Conversation
    from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate

    tokenizer = model.tokenizer.tokenizer
    question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "x"}
    try:
        rendered = ChatTemplate(tokenizer, chat_template).render(Conversation([question, answer]))
    except ValueError:
        return ()
    start, stop = rendered.spans[-1]
    ids = tokenizer.encode(rendered.text[start:stop].strip().removeprefix("x").strip(), add_special_tokens=False)
    return tuple(ids) if len(ids) == 1 else ()


def chat(
    path: str | Path,
    system: str | None,
    chat_template: Path | None,
    watch: bool | None,
    replay: Path | None,
    best: bool,
    preset: str | None,
    settings: Mapping[str, Any],
) -> None:
    """Talk until the end of standard input; see ``cli.sampling`` for the arguments."""
    template = None if chat_template is None else read_utf8(Path(chat_template))
    session = open_session(path, best=best, preset=preset, settings=settings, watch=watch, replay=replay)
    conversation = Chat(session, system, template)
    console = Console(stderr=True)
    # A terminal has the answer already.
    on_screen = session.screen is not None and session.screen.is_terminal and sys.stdout.isatty()
    if sys.stdin.isatty():
        console.print(f"{RESET} starts anew, {QUIT} or the end of input ends.", style="dim")
    try:
        for text in _said(console):
            if text == RESET:
                conversation.reset()
                continue
            if session.replay is not None:
                session.replay.title = text
            try:
                answer = conversation.answer(text)
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            if not on_screen:
                print(printable(answer), flush=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)
    finally:
        if session.replay is not None:
            session.replay.write()


def _said(console: Console) -> Iterator[str]:
    """What the user types, line by line, without empty lines."""
    while True:
        try:
            text = console.input("[bold]> [/]") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if text.strip() == QUIT:
            return
        if text.strip():
            yield text.strip()
