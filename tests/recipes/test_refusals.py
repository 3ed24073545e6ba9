"""``nemo llm pretrain`` itself, as torchrun starts it."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nemo

MODEL = "mdlm_tiny(path='.')"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--factory", MODEL, "model.objective.mask_token_id=-5"], "mask_token_id=-5"),
        (["--factory", "mdlm_tiny(path='nosuch/folder')"], "path=nosuch/folder is neither"),
    ],
    ids=["what a constructor refuses", "what a recipe refuses"],
)
def test_the_first_rank_alone_refuses_a_recipe(arguments, message, tmp_path):
    code = "import sys; sys.argv[0] = 'nemo'; from nemo_run.__main__ import app; app()"
    command = [sys.executable, "-c", code, "llm", "pretrain", *arguments, "--yes"]
    clean = {key: value for key, value in os.environ.items() if "RANK" not in key} | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(2):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        processes.append(subprocess.Popen(command, env=clean | ranks, cwd=tmp_path, text=True, **pipes))
    first, second = (process.communicate(timeout=300)[0] for process in processes)
    assert [process.returncode for process in processes] == [1, 1], first[-2000:] + second[-2000:]
    assert message in first.rpartition("Unexpected error: ")[2]
    assert "Unexpected error" not in second and "Traceback" not in second
