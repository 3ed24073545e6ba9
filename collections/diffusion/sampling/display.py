"""A terminal view of a canvas as it is denoised.

Shape letters: T canvas positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from nemo_dllm.collections.diffusion.sampling.step import DenoiseStep

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MASK_CHARACTER = "░"
PLAIN_FRAMES = 6
_STYLES = {"mask": "dim", "new": "bold black on green", "old": ""}
# An untrained model emits escape bytes, which would reach the terminal as commands. C0 has visible counterparts.
VISIBLE_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
VISIBLE_CONTROLS |= {code: "\N{REPLACEMENT CHARACTER}" for code in range(0x7F, 0xA0)}

Decode = Callable[[list[int]], str]


def watch(steps: Iterable[DenoiseStep], decode: Decode, console: Console | None = None) -> DenoiseStep | None:
    """Show the canvas of a single row while it is denoised, and pass on the last step.

    In a terminal the canvas is redrawn in place. Elsewhere up to ``PLAIN_FRAMES`` plain frames are printed, evenly
    spaced over the filled positions.

    Args:
        steps: from ``denoise`` or ``generate_stream``, with one row.
        decode: token ids -> text, as of a tokenizer.
        console: where to draw; None is standard output.

    Returns:
        The last step, or None if there was nothing to denoise.

    Raises:
        ValueError: there is more than one row.
    """
    from rich.console import Console

    console = Console() if console is None else console
    show = _show_live if console.is_terminal else _print_frames
    last = None
    for last in show(_single_row(steps), decode, console):  # noqa: B007
        pass
    return last


def canvas_text(step: DenoiseStep, decode: Decode) -> Text:
    """Row 0 of a canvas as styled text: a dim block per hole, new and edited tokens highlighted, the rest plain.

    Neighbouring known tokens are decoded together, since one character may span several byte-level tokens; a character
    that new and old tokens share takes the style of the later ones. Bytes that make no character yet are whatever
    ``decode`` makes of them, usually a replacement character.
    """
    from rich.text import Text

    text = Text()
    tokens, holes, new = (x_BT[0].tolist() for x_BT in (step.tokens_BT, step.holes_BT, step.new_BT))
    for piece, kind in canvas_pieces(tokens, holes, new, decode):
        text.append(piece.translate(VISIBLE_CONTROLS), _STYLES[kind])
    return text


def canvas_pieces(
    tokens: Sequence[int], holes: Sequence[bool], new: Sequence[bool], decode: Decode
) -> Iterator[tuple[str, str]]:
    """A row as texts with their kinds: "mask" for a run of holes (a block per hole), "new" and "old" tokens.

    Args:
        tokens: ids of the row; those under holes are not read.
        holes, new: per token, whether it is still to be found, and whether it has just been.
        decode: token ids -> text.
    """
    for is_hole, run in groupby(range(len(tokens)), key=holes.__getitem__):
        positions = list(run)
        if is_hole:
            yield MASK_CHARACTER * len(positions), "mask"
            continue
        kinds = ["new" if new[position] else "old" for position in positions]
        yield from _styled_pieces([tokens[position] for position in positions], kinds, decode)


def _styled_pieces(ids: list[int], kinds: list[str], decode: Decode) -> Iterator[tuple[str, str]]:
    whole = decode(ids)
    start = tokens_seen = 0
    for kind, run in groupby(kinds):
        tokens_seen += len(list(run))
        if tokens_seen == len(ids):
            end = len(whole)
        else:
            end = max(start, _common_prefix_length(decode(ids[:tokens_seen]), whole))
        yield whole[start:end], kind
        start = end


def _common_prefix_length(left: str, right: str) -> int:
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter)


def _single_row(steps: Iterable[DenoiseStep]) -> Iterator[DenoiseStep]:
    for step in steps:
        rows = len(step.tokens_BT)
        if rows != 1:
            raise ValueError(f"steps has {rows} rows; watch shows one, so sample one prompt")
        yield step


def _caption(step: DenoiseStep) -> str:
    return f"step {step.step}, {int(step.holes_BT.sum())} masked"


def _show_live(steps: Iterator[DenoiseStep], decode: Decode, console: Console) -> Iterator[DenoiseStep]:
    from rich.live import Live
    from rich.panel import Panel

    with Live(console=console, auto_refresh=False) as live:
        for step in steps:
            live.update(Panel(canvas_text(step, decode), title=_caption(step), title_align="left"), refresh=True)
            yield step


def _print_frames(steps: Iterator[DenoiseStep], decode: Decode, console: Console) -> Iterator[DenoiseStep]:
    filled = frames = 0
    for step in steps:
        filled += int(step.committed_BT.sum())
        due = PLAIN_FRAMES * filled // (filled + int(step.holes_BT.sum()))
        if due > frames:
            frames = due
            console.print(f"[{_caption(step)}]", markup=False, highlight=False)
            console.print(canvas_text(step, decode), soft_wrap=True)
        yield step
