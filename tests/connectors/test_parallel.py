import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nemo
@pytest.mark.parametrize("script", ["parallel_load.py", "parallel_moe.py"])
def test_two_ranks_load_and_export_what_one_does(models, tmp_path, script):
    script = Path(__file__).with_name(script)
    # Files, because a rank whose pipe is full waits for its reader, and the other rank for it.
    logs = [tmp_path / f"rank{rank}" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "store", str(rank), models],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    codes = [rank.wait(timeout=300) for rank in ranks]
    assert codes == [0, 0], "\n".join(log.read_text()[-5000:] for log in logs)
    assert all("\nok\n" in log.read_text() for log in logs)
