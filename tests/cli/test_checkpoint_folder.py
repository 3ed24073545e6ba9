"""Commands that take a checkpoint say at once that a folder holds none."""

import sys
from pathlib import Path

import pytest

from nemo_dllm.cli import main as cli

MODEL = str(Path(__file__).parents[1] / "golden" / "models" / "a2d_qwen3")


@pytest.mark.parametrize(
    "command, error",
    [
        ("generate empty", "empty holds no checkpoint; name the folder of a run"),
        ("chat empty", "empty holds no checkpoint"),
        ("infill empty --text <mask>", "empty holds no checkpoint"),
        ("serve empty", "empty holds no checkpoint"),
        ("evaluate empty file", "empty holds no checkpoint"),
        ("export empty out", "empty holds no checkpoint"),
        ("verify empty empty", "empty holds no checkpoint"),
        ("generate file", "file is a file; name the folder of a run or of a checkpoint"),
        ("generate run", "run/checkpoints holds no complete checkpoint; train on, or name another run"),
        (f"generate {MODEL} --best", f"--best chooses among the checkpoints of a run, and {MODEL} is no run"),
    ],
)
def test_a_folder_without_a_checkpoint_is_told_before_nemo_is_imported(monkeypatch, capsys, tmp_path, command, error):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "run" / "checkpoints" / "cut_short" / "weights").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", *command.split()])
    monkeypatch.setattr(cli, "_import", lambda *_: pytest.fail("imported NeMo"))
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err.startswith(f"error: {error}")
