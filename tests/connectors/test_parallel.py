import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nemo
@pytest.mark.parametrize("script", ["parallel_load.py", "parallel_moe.py"])
def test_two_ranks_load_and_export_what_one_does(models, tmp_path, script):
    script = Path(__file__).with_name(script)
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "store", str(rank), models],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (printed, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0 and printed.endswith("ok\n"), errors[-5000:]
