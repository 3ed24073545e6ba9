"""Draw the validation curves of smollm2.py as an SVG, by hand: no plotting library is needed.

python docs/tutorials/plot_curves.py runs/shakespeare/result.json runs/gsm8k/result.json smollm2.svg
"""

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 24, 40, 52
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def scale(low: float, high: float, start: float, end: float):
    """The linear map from [low, high] to [start, end]."""
    return lambda value: start + (value - low) * (end - start) / (high - low)


def axes(x, y, steps: int, perplexities: list[int]) -> list[str]:
    """Grid lines with their labels, and the names of the axes."""
    parts = []
    for perplexity in perplexities:
        height = y(math.log(perplexity))
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height:.1f}" y2="{height:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{perplexity:,}</text>')
    for step in range(0, steps + 1, max(1, steps // 8)):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        *parts,
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">optimizer steps</text>',
        f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
        "perplexity per token (diffusion: upper bound)</text>",
    ]


def draw(results: list[dict]) -> str:
    """The SVG: one curve per result, and a dashed line for its autoregressive source."""
    steps = max(row["step"] for result in results for row in result["curve"])
    nats = [row["nll_bound"] for result in results for row in result["curve"]]
    nats += [result["autoregressive_source"]["nll"] for result in results]
    marks = [m * 10**e for e in range(8) for m in (1, 2, 5)]
    low = max((m for m in marks if m <= math.exp(min(nats))), default=1)
    high = min(m for m in marks if m >= math.exp(max(nats)))
    x = scale(0, steps, LEFT, WIDTH - RIGHT)
    y = scale(math.log(low), math.log(high), HEIGHT - BOTTOM, TOP)
    parts = axes(x, y, steps, [m for m in marks if low <= m <= high])
    for index, (result, colour) in enumerate(zip(results, COLOURS, strict=False)):
        points = " ".join(f"{x(row['step']):.1f},{y(row['nll_bound']):.1f}" for row in result["curve"])
        source = y(result["autoregressive_source"]["nll"])
        label = LEFT + 12 + 330 * index
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{source:.1f}" y2="{source:.1f}" stroke="{colour}" '
            'stroke-dasharray="5 4"/>',
            f'<text x="{label}" y="24" fill="{colour}">{result["text"]}: '
            f"{result['before']['perplexity_bound']:,.0f} to {result['after']['perplexity_bound']:,.1f}, "
            f"source (dashed) {result['autoregressive_source']['perplexity']:,.1f}</text>",
        ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    *files, svg = sys.argv[1:]
    Path(svg).write_text(draw([json.loads(Path(file).read_text()) for file in files]))
