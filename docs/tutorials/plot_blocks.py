"""Draw what the block size does to loss and speed, from the result of blocks.py, as an SVG by hand.

python docs/tutorials/plot_blocks.py runs/blocks/result.json blocks.svg
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from plot_curves import COLOURS, scale

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 320, 300, 52, 12, 62, 44


class Line(NamedTuple):
    """A value per block size."""

    name: str
    values: list[float]


def panel(title: str, sizes: list[str], lines: list[Line], left: float, source: float | None = None) -> list[str]:
    """One plot, with its lines in the order of the sizes; ``source`` is a dashed level across."""
    values = [value for line in lines for value in line.values] + ([] if source is None else [source])
    # Speeds are compared by their ratios, from 0; losses by their differences.
    low = 0.0 if source is None else min(values) - 0.05 * (max(values) - min(values))
    high = max(values) + 0.05 * (max(values) - low)
    x = scale(0, max(len(sizes) - 1, 1), left + LEFT + 10, left + WIDTH - RIGHT - 14)
    y = scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [f'<text x="{left + LEFT}" y="18" font-weight="bold">{title}</text>']
    for tick in range(5):
        value = low + (high - low) * tick / 4
        start, end, at = left + LEFT, left + WIDTH - RIGHT, y(value)
        parts.append(f'<line x1="{start}" x2="{end}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        label = f"{value:,.0f}" if high >= 50 else f"{value:.2f}"
        parts.append(f'<text x="{start - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for index, size in enumerate(sizes):
        parts.append(f'<text x="{x(index):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{size}</text>')
    parts.append(f'<text x="{left + (LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">block size</text>')
    if source is not None:
        at = y(source)
        line = f'<line x1="{left + LEFT}" x2="{left + WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" '
        parts.append(f'{line}stroke="#555" stroke-dasharray="5 4"/>')
        parts.append(f'<text x="{left + LEFT}" y="50" fill="#555">dashed: autoregressive source</text>')
    for index, (line, colour) in enumerate(zip(lines, COLOURS, strict=False)):
        points = [(x(at), y(value)) for at, value in enumerate(line.values)]
        path = " ".join(f"{right:.1f},{down:.1f}" for right, down in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{right:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for right, down in points]
        parts.append(f'<text x="{left + LEFT + 140 * index}" y="35" fill="{colour}">{line.name}</text>')
    return parts


def draw(result: dict) -> str:
    """The SVG: loss, training speed and sampling speed over the block size."""
    sizes, rows = list(result["sizes"]), list(result["sizes"].values())
    loss = [Line("after training", [row["after"]["nll_bound"] for row in rows])]
    training = [Line("training", [row["train_tokens_per_second"] for row in rows])]
    sampling = [
        Line(name, [row["sampling"][pace]["tokens_per_second"] for row in rows])
        for name, pace in (
            ("one token per pass", "one_token"),
            (f"confidence above {result['settings']['threshold']}", "threshold"),
        )
    ]
    parts = [
        *panel("bound, nats per token", sizes, loss, 0, source=result["source"]["nll"]),
        *panel("training, tokens per second", sizes, training, WIDTH),
        *panel("sampling, tokens per second", sizes, sampling, 2 * WIDTH),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {3 * WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(draw(json.loads(source.read_text())))
