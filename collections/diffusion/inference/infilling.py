"""Text with gaps, filled in."""

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nemo_dllm.collections.diffusion.inference.prompts import read_utf8
from nemo_dllm.collections.diffusion.inference.session import Session, open_session
from nemo_dllm.collections.diffusion.inference.text import printable
from nemo_dllm.collections.diffusion.sampling import denoise, settings_of_gaps

_MARK = re.compile(r"<mask(?::(\d+))?>")


def parse_gaps(text: str, length: int) -> list[str | int]:
    """Split a text at its marks, ``<mask>`` and ``<mask:LENGTH>``, into texts and lengths of gaps in tokens.

    Raises:
        ValueError: there is no mark, or one without a token.
    """
    parts: list[str | int] = []
    end = 0
    for mark in _MARK.finditer(text):
        parts += [text[end : mark.start()], int(mark[1]) if mark[1] else length]
        end = mark.end()
    parts = [part for part in (*parts, text[end:]) if part != ""]
    lengths = [part for part in parts if isinstance(part, int)]
    if not lengths:
        raise ValueError("the text has no <mask>; mark what is missing with <mask> or <mask:LENGTH>")
    if min(lengths) < 1:
        raise ValueError("a gap of 0 tokens cannot be filled; give it a length of at least 1")
    return parts


def infill_text(session: Session, parts: list[str | int]) -> str:
    """Fill the gaps of a text.

    Args:
        session: the model and its settings; lengths and end tokens have no meaning here.
        parts: texts, and lengths of gaps in tokens.

    Returns:
        The whole text.
    """
    model, tokens, holes = session.model, [], []
    encoded = [part if isinstance(part, int) else model.encode(part) for part in parts]
    length = sum(part if isinstance(part, int) else len(part) for part in encoded)
    if length > model.seq_length:
        raise ValueError(f"the text has {length} tokens, and the model's context is {model.seq_length}; shorten it")
    for part in encoded:
        ids = [0] * part if isinstance(part, int) else part
        tokens += ids
        holes += [isinstance(part, int)] * len(ids)
    if holes[0] and session.config.bos_token_id is not None:
        # Shifted logits score a token from its left neighbour.
        tokens, holes = [session.config.bos_token_id, *tokens], [False, *holes]
    # Text may follow whatever is found, so nothing ends a row.
    config = replace(session.config, stop_at_eos=False, stop_token_ids=(), stop_strings=(), min_new_tokens=0)
    steps = denoise(
        model.denoiser,
        torch.tensor([tokens], device=model.device),
        torch.tensor([holes], device=model.device),
        model.mask_token_id,
        config,
    )
    return model.decode(session.follow(steps).tokens_BT[0].tolist())


def infill(
    path: str | Path,
    text: str | None,
    text_file: Path | None,
    prefix: str | None,
    suffix: str,
    length: int,
    watch: bool | None,
    replay: Path | None,
    best: bool,
    preset: str | None,
    settings: Mapping[str, Any],
) -> None:
    """Fill in a text and print it; see ``cli.sampling`` for the arguments."""
    if suffix and prefix is None and (text is not None or text_file is not None):
        raise ValueError(f"suffix={suffix} goes with a prefix; write it behind the text with <mask>, or leave it out")
    if text_file is not None:
        text = read_utf8(Path(text_file))
    if text is None and prefix is None:
        raise ValueError(
            "there is nothing to fill in; give text=TEXT or text_file=FILE with <mask> in it, or prefix=TEXT and "
            "suffix=TEXT"
        )
    if length < 1:
        raise ValueError(f"length={length} must be at least 1")
    parts = parse_gaps(text, length) if text is not None else [p for p in (prefix, length, suffix) if p != ""]
    settings = settings_of_gaps(settings, sum(part for part in parts if isinstance(part, int)))
    session = open_session(path, best=best, preset=preset, settings=settings, watch=watch, replay=replay)
    if session.model.block_size is not None and not isinstance(parts[-1], int):
        print(
            f"note: this model is block-causal and sees of the text behind a gap what lies in the same block of "
            f"{session.model.block_size} tokens",
            file=sys.stderr,
        )
    print(printable(infill_text(session, parts)))
    if session.replay is not None:
        session.replay.write()
