"""A command of a tutorial in a process that has imported NeMo already; the global ``job`` says which, and where."""

import os
import runpy
import sys
from pathlib import Path

import torch

from nemo_dllm.cli.main import main


def run(command, folder, output):
    """``command`` begins with ``nemo-dllm``, or with ``python`` and a script; ``output`` gets all that it writes."""
    os.chdir(folder)
    torch.set_num_threads(1)
    with open(output, "w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    program, *arguments = command
    if program == "nemo-dllm":
        sys.argv = command
        main()
        return
    script = Path(__file__).parents[2] / arguments[0]
    sys.argv = [str(script), *arguments[1:]]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    run(**job)  # noqa: F821
