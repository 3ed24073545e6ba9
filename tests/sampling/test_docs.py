"""The page on sampling says what the code does."""

import re
from dataclasses import fields
from pathlib import Path

from nemo_dllm.collections.diffusion.sampling import (
    PRESETS,
    REFERENCE_PRESETS,
    REMASKING_POLICIES,
    ReferenceQuirks,
    sampler_fields,
)

PAGE = (Path(__file__).parents[2] / "docs" / "sampling.md").read_text()


def test_code_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/sampling.md", "exec"), {})


def test_the_table_of_settings_is_that_of_the_code():
    rows = [f"| `{field.name}` | `{field.default!r}` | {field.help} |" for field in sampler_fields().values()]
    assert "\n".join(["| setting | default | |", "|---|---|---|", *rows]) in PAGE


def test_every_preset_quirk_and_policy_has_its_line():
    names = [*PRESETS, *REFERENCE_PRESETS, *REMASKING_POLICIES, *(field.name for field in fields(ReferenceQuirks))]
    assert [name for name in names if f"`{name}`" not in PAGE] == []
