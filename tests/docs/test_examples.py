"""The Python blocks of the documentation run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

ROOT = Path(__file__).parents[2]
# First line of a block that needs those before it.
CONTINUES = "# Continues.\n"


def examples_of(page: Path) -> list[str]:
    """The scripts of a page: each block, with the blocks that continue it."""
    examples = []
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        if block.startswith(CONTINUES):
            examples[-1] += block
        else:
            examples.append(block)
    return examples


BLOCKS = [
    pytest.param(example, id=f"{page.name} {number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, example in enumerate(examples_of(page), start=1)
]


def test_there_are_examples():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS)
def test_example(block, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(3000)))
    (tmp_path / "example.py").write_text(block)
    run = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
