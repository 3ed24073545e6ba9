"""What blocks.py has measured: kept in a file, shown as a table.

The result is a dictionary of `settings`, `device`, `source` (the autoregressive checkpoint) and `sizes`, which holds a
row per block size.
"""

import json
import math
import os
from pathlib import Path

from rich.table import Table

WHOLE = "whole"
"""The size of a block as long as the row, which is masked diffusion."""


def report(result: dict) -> Table:
    """The table of all sizes, under the loss of what they started from."""
    source, threshold = result["source"], result["settings"]["threshold"]
    caption = "bound: nats per token; tok/s: tokens per second; calls: of the model, per sampled token"
    table = Table(caption=caption, box=None, padding=(0, 1, 0, 0))
    sampling = [f"{name}\n{what}" for name in ("1/pass", f"> {threshold}") for what in ("tok/s", "calls")]
    for column in ("block\nsize", "bound\nbefore", "bound\nafter", "perpl.\nafter", "train\ntok/s", *sampling):
        table.add_column(column, justify="right")
    table.add_row("source", "", f"{source['nll']:.3f}", f"{source['perplexity']:,.1f}")
    for block_size, row in result["sizes"].items():
        before, after = row["before"]["nll_bound"], row["after"]["nll_bound"]
        cells = [f"{before:.3f}", f"{after:.3f}", f"{math.exp(after):,.1f}", f"{row['train_tokens_per_second']:,.0f}"]
        for pace in row["sampling"].values():
            cells += [f"{pace['tokens_per_second']:.1f}", f"{pace['calls_per_token']:.2f}"]
        table.add_row(block_size, *cells)
    return table


def write_result(result: dict, file: Path) -> None:
    """Put the result in the place of the last one, whole or not at all, with its sizes in order."""
    by_size = sorted(result["sizes"].items(), key=lambda item: math.inf if item[0] == WHOLE else int(item[0]))
    result["sizes"] = dict(by_size)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    os.replace(unfinished, file)


def read_result(file: Path, settings: dict) -> dict:
    """What an earlier run with the same settings left behind.

    Raises:
        ValueError: where the settings were others.
    """
    if not file.exists():
        return {"settings": settings, "sizes": {}}
    result = json.loads(file.read_text())
    changed = [
        f"{name}={result['settings'].get(name)!r}"
        for name in settings
        if result["settings"].get(name) != settings[name]
    ]
    if changed:
        raise ValueError(f"{file} was measured with {', '.join(changed)}; give these again, or another folder")
    return result
