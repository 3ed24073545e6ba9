"""Conversations with a model."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_dllm.collections.diffusion.chat_prompts import ChatTemplate, read_template
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
        template_variables: of the template, such as ``enable_thinking``.

    Raises:
        ValueError: there is no tokenizer, or no chat template; or a name is none of a variable of templates.
    """

    def __init__(
        self,
        session: Session,
        system: str | None = None,
        chat_template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
    ):
        if session.model.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, so there is no chat")
        self._template = ChatTemplate(session.model.tokenizer.tokenizer, chat_template)
        self._variables = template_variables or {}
        self._template.check_variables(self._variables)
        ends = (*session.config.stop_token_ids, *self._template.end_token_ids)
        config = replace(session.config, stop_token_ids=tuple(dict.fromkeys(ends)))
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
        tokens = self._template.prompt(messages, self._variables)
        session.check_length(f"the conversation ({RESET} starts anew)", len(tokens))
        config = replace(session.config, max_length=min(model.seq_length, session.config.max_length or sys.maxsize))
        steps = generate_stream(model.denoiser, [tokens], config, decode=model.decode, **session.canvas())
        last = session.follow(steps, start=len(tokens))
        completion = generation_result(last, [tokens], config, model.decode).completions[0]
        said = model.decode(completion.tolist()).strip()
        self.messages = [*messages, {"role": "assistant", "content": said}]
        return said


def chat(
    path: str | Path,
    system: str | None,
    chat_template: Path | None,
    template_variables: str | None,
    watch: bool | None,
    replay: Path | None,
    best: bool,
    preset: str | None,
    settings: Mapping[str, Any],
) -> None:
    """Talk until the end of standard input; see ``cli.sampling`` for the arguments."""
    template, variables = read_template(chat_template), _read_variables(template_variables)
    session = open_session(path, best=best, preset=preset, settings=settings, watch=watch, replay=replay)
    conversation = Chat(session, system, template, variables)
    console = Console(stderr=True)
    # A terminal has the answer already.
    on_screen = session.screen is not None and session.screen.is_terminal and sys.stdout.isatty()
    if sys.stdin is not None and sys.stdin.isatty():
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


def _read_variables(text: str | None) -> dict[str, Any]:
    """Variables of a template from JSON."""
    try:
        variables = json.loads(text or "{}")
    except json.JSONDecodeError:
        variables = None
    if not isinstance(variables, dict):
        raise ValueError(f'template_variables={text} is no JSON object; write {{"enable_thinking": false}}, say')
    return variables


def _said(console: Console) -> Iterator[str]:
    """What the user types, line by line, without empty lines; nothing where standard input is closed."""
    if isinstance(sys.stdin, TextIOWrapper):
        # A byte that is no text must not end the conversation.
        sys.stdin.reconfigure(errors="replace")
    while sys.stdin is not None:
        try:
            text = console.input("[bold]> [/]") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if text.strip() == QUIT:
            return
        if text.strip():
            yield text.strip()
