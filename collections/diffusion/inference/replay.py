"""Denoising recorded, and written as a page that plays it (one HTML file, which needs nothing else), or as a GIF."""

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_dllm.collections.diffusion.inference.output_file import check_can_write, unfinished_file
from nemo_dllm.collections.diffusion.inference.replay_gif import write_gif
from nemo_dllm.collections.diffusion.sampling import DenoiseStep, canvas_pieces
from nemo_dllm.collections.diffusion.sampling.display import VISIBLE_CONTROLS, Decode

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Denoising</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #aaa; border-radius: 6px; padding: 1em;
  min-height: 6em; font: 15px/1.5 ui-monospace, monospace; }
.mask { color: #aaa; } .new { background: #9e9; color: #000; } .title { font-weight: bold; white-space: pre-wrap; }
input { width: 100%; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } }
</style>
<div class="title"></div><pre></pre><input type="range" min="0" value="0" aria-label="step">
<button>play</button> <span></span>
<script type="application/json">FRAMES</script>
<script>
const frames = JSON.parse(document.querySelector("script").textContent);
const find = (name) => document.querySelector(name);
const slider = find("input"), button = find("button");
let timer = null;
slider.max = frames.length - 1;
function show() {
  const frame = frames[slider.value];
  find(".title").textContent = frame.title;
  find("pre").replaceChildren(...frame.pieces.map(([text, kind]) => {
    const piece = document.createElement("span");
    piece.className = kind; piece.textContent = text; return piece;
  }));
  find("body > span").textContent = frame.caption;
}
function stop() { clearInterval(timer); timer = null; button.textContent = "play"; }
function play() {
  if (slider.value == slider.max) slider.value = 0;
  button.textContent = "pause";
  timer = setInterval(() => {
    if (slider.value == slider.max) return stop();
    slider.value = Number(slider.value) + 1; show();
  }, 150);
}
slider.oninput = show;
button.onclick = () => timer === null ? (play(), show()) : stop();
show(); play();
</script></html>
"""


def write_page(path: Path, frames: Sequence[dict[str, Any]]) -> None:
    """Write the frames of a :class:`Replay` as a page."""
    # "</script>" in a text would end the data.
    data = json.dumps(frames, ensure_ascii=False).replace("<", "\\u003c")
    path.write_text(_PAGE.replace("FRAMES", data), encoding="utf-8")


_WRITERS: Mapping[str, Callable[[Path, Sequence[dict[str, Any]]], None]] = {
    ".html": write_page,
    ".htm": write_page,
    ".gif": write_gif,
}


class Replay:
    """Records denoising, and writes it as a page or a GIF.

    Args:
        path: file to write, over an existing one.
        title: what is shown above the text; may be changed between rows.

    Raises:
        ValueError: the file has the name of something else, or Pillow is missing, which a GIF needs.
        OSError: it cannot be written, see :func:`check_can_write`.
    """

    def __init__(self, path: Path, title: str = ""):
        kind = path.suffix.lower()
        if kind not in _WRITERS:
            raise ValueError(
                f"replay={path} has the name of neither a page nor a picture; name an .html or a .gif file"
            )
        if kind == ".gif" and importlib.util.find_spec("PIL") is None:
            raise ValueError(
                f"replay={path} needs Pillow; install the extra `gif` (pip install 'nemo-dllm[gif]') or name an .html "
                "file"
            )
        check_can_write(path, "replay")
        self.path, self.title = path, title
        self._frames: list[dict] = []

    def add(self, step: DenoiseStep, decode: Decode) -> None:
        """Record row 0 of a canvas."""
        row = (values_BT[0].tolist() for values_BT in (step.tokens_BT, step.holes_BT, step.new_BT))
        pieces = [[text.translate(VISIBLE_CONTROLS), kind] for text, kind in canvas_pieces(*row, decode)]
        caption = f"step {step.step}, {int(step.holes_BT[0].sum())} masked"
        self._frames.append({"title": self.title, "caption": caption, "pieces": pieces})

    def write(self) -> None:
        """Write the file, and say so on standard error; nothing where nothing was recorded."""
        if self._frames:
            with unfinished_file(self.path) as file:
                _WRITERS[self.path.suffix.lower()](file, self._frames)
            print(f"replay: {self.path}", file=sys.stderr)
