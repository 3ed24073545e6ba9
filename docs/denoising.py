"""Draw docs/denoising.svg: a few frames of a sample as it is denoised.

python docs/denoising.py runs/mdlm_tiny docs/denoising.svg
"""

import io
import re
import sys
from pathlib import Path

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

from rich.console import Console  # noqa: E402

from nemo_dllm.collections.diffusion.inference import load_checkpoint  # noqa: E402
from nemo_dllm.collections.diffusion.sampling import canvas_text, generate_stream  # noqa: E402

FRAMES = 4


def main(checkpoint: str, file: str) -> None:
    """Sample from a checkpoint and save evenly spaced frames as an SVG."""
    model = load_checkpoint(checkpoint)
    settings = model.sampler_config(max_new_tokens=64, steps=16, temperature=0.6, remasking="random", seed=1)
    steps = list(
        generate_stream(model.denoiser, [model.encode("import os")], settings, mask_token_id=model.mask_token_id)
    )
    console = Console(record=True, width=76, file=io.StringIO(), force_terminal=True)
    for frame in range(1, FRAMES + 1):
        step = steps[frame * len(steps) // FRAMES - 1]
        console.rule(f"step {step.step} of {len(steps)}, {int(step.holes_BT.sum())} masked")
        console.print(canvas_text(step, model.decode))
    # Without rich's fonts, which a browser would fetch from elsewhere.
    svg = re.sub(r"@font-face \{.*?\}|<!--.*?-->", "", console.export_svg(title="nemo-dllm generate"), flags=re.DOTALL)
    Path(file).write_text(svg.replace("Fira Code", "monospace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
