"""Denoising as a moving picture: a page of monospaced text per step."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.cells import get_character_cell_size

if TYPE_CHECKING:
    from PIL import Image

COLUMNS = 80
MOST_LINES = 36
"""Of text; a longer one is shown around the place where it changes."""
MOST_FRAMES = 500
"""All are in memory before they are written; of more steps some are left out."""
STEP_MILLISECONDS = 150
LAST_MILLISECONDS = 2_000

CELL_WIDTH, CELL_HEIGHT, MARGIN = 9, 19, 12
_FONT_SIZE = 15
_MONOSPACED = ("DejaVuSansMono.ttf", "LiberationMono-Regular.ttf", "Menlo.ttc", "consola.ttf")

_MASK = "\N{MIDDLE DOT}"
_WHITE, _BLACK, _GREY, _GREEN = (255, 255, 255), (0, 0, 0), (140, 140, 140), (153, 238, 153)
_INKS = {"old": (_BLACK, _WHITE), "new": (_BLACK, _GREEN), "mask": (_GREY, _WHITE), "about": (_GREY, _WHITE)}
_SHADES = 16
_TAB = 4


class _Cell(NamedTuple):
    """A character, with what combines with it, and how many columns it takes."""

    text: str
    width: int
    kind: str


def write_gif(path: Path, frames: Sequence[dict[str, Any]]) -> None:
    """Write frames of a :class:`Replay` as a GIF that plays for ever.

    All pictures have the size of the one with the most lines.

    Args:
        path: file to write, over an existing one.
        frames: at least one, each with ``title``, ``caption`` and ``pieces`` of (text, kind).
    """
    frames = _evenly(frames, MOST_FRAMES)
    pages = [_page(frame) for frame in frames]
    lines = max(map(len, pages))
    printer = _Printer()
    pictures = [printer.picture(page, lines) for page in pages]
    pictures[0].save(
        path,
        format="GIF",
        save_all=True,
        append_images=pictures[1:],
        duration=[STEP_MILLISECONDS] * (len(pictures) - 1) + [LAST_MILLISECONDS],
        loop=0,
    )


def _evenly(frames: Sequence[dict[str, Any]], most: int) -> Sequence[dict[str, Any]]:
    """At most so many, the first and the last among them."""
    if len(frames) <= most:
        return frames
    return [frames[index * (len(frames) - 1) // (most - 1)] for index in range(most)]


def _page(frame: dict[str, Any]) -> list[list[_Cell]]:
    """The lines of a frame: title, text, caption."""
    title = _wrapped([(frame["title"], "about"), ("\n\n", "about")])[:-1] if frame["title"] else []
    text = _wrapped([(_MASK * len(text) if kind == "mask" else text, kind) for text, kind in frame["pieces"]])
    return [
        *_window(title, len(title) - 3),
        *_window(text, _change(text)),
        [],
        *_wrapped([(frame["caption"], "about")]),
    ]


def _change(lines: Sequence[Sequence[_Cell]]) -> int:
    """The first line with something new, or else with a mask; 0 where there is neither."""
    for kind in ("new", "mask"):
        for number, line in enumerate(lines):
            if any(cell.kind == kind for cell in line):
                return number
    return 0


def _window(lines: list[list[_Cell]], center: int) -> list[list[_Cell]]:
    first = min(center - MOST_LINES // 2, len(lines) - MOST_LINES)
    return lines[max(first, 0) :][:MOST_LINES]


def _wrapped(pieces: Sequence[tuple[str, str]]) -> list[list[_Cell]]:
    """Lines of at most ``COLUMNS`` columns."""
    lines: list[list[_Cell]] = [[]]
    column = 0
    for character, kind in ((character, kind) for text, kind in pieces for character in text):
        width = _TAB - column % _TAB if character == "\t" else get_character_cell_size(character)
        if character == "\n" or column + width > COLUMNS:
            lines.append([])
            column = 0
        if width == 0 and lines[-1] and character != "\n":
            last = lines[-1][-1]
            lines[-1][-1] = last._replace(text=last.text + character)
        elif character != "\n":
            lines[-1].append(_Cell(" " if character == "\t" else character, width, kind))
            column += width
    return lines


class _Printer:
    """Prints pages; each cell is drawn once."""

    def __init__(self):
        self._font, self._palette = _font(), _palette()
        self._cells: dict[_Cell, Image.Image] = {}

    def picture(self, page: Sequence[Sequence[_Cell]], lines: int) -> "Image.Image":
        """A page with room for so many lines."""
        size = (2 * MARGIN + COLUMNS * CELL_WIDTH, 2 * MARGIN + lines * CELL_HEIGHT)
        picture = self._quantized(_blank(size, _WHITE))
        for number, line in enumerate(page):
            left = MARGIN
            for cell in line:
                if cell not in self._cells:
                    self._cells[cell] = self._drawn(cell)
                picture.paste(self._cells[cell], (left, MARGIN + number * CELL_HEIGHT))
                left += cell.width * CELL_WIDTH
        return picture

    def _drawn(self, cell: _Cell) -> "Image.Image":
        from PIL import ImageDraw

        ink, paper = _INKS[cell.kind]
        drawn = _blank((max(cell.width, 1) * CELL_WIDTH, CELL_HEIGHT), paper)
        place = (drawn.size[0] / 2, CELL_HEIGHT - 5)
        ImageDraw.Draw(drawn).text(place, cell.text, ink, self._font, anchor="ms")
        return self._quantized(drawn)

    def _quantized(self, drawn: "Image.Image") -> "Image.Image":
        from PIL import Image

        return drawn.quantize(palette=self._palette, dither=Image.Dither.NONE)


def _blank(size: tuple[int, int], color: tuple[int, int, int]) -> "Image.Image":
    from PIL import Image

    return Image.new("RGB", size, color)


def _font() -> Any:
    """A monospaced font of this machine, or Pillow's own; either way each character stands in a cell of its own."""
    from PIL import ImageFont

    for name in _MONOSPACED:
        try:
            return ImageFont.truetype(name, _FONT_SIZE)
        except OSError:
            continue
    return ImageFont.load_default(_FONT_SIZE)


def _palette() -> "Image.Image":
    """From each ink to its paper, in steps, for smooth letters."""
    from PIL import Image

    shades = [
        round(ink + (paper - ink) * step / (_SHADES - 1))
        for inks in dict.fromkeys(_INKS.values())
        for step in range(_SHADES)
        for ink, paper in zip(*inks, strict=True)
    ]
    image = Image.new("P", (1, 1))
    image.putpalette(shades)
    return image
