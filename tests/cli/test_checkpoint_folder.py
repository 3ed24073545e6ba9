"""Commands that take a checkpoint say at once that a folder holds none."""

import json
import sys
from pathlib import Path

import pytest

from nemo_dllm.cli import main as cli
from nemo_dllm.collections.diffusion.checkpoint_folder import CheckpointKind, check_hf_weights, checkpoint_kind

MODELS = Path(__file__).parents[1] / "golden" / "models"
MODEL = str(MODELS / "a2d_qwen3")


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
        ("generate bare", "bare has no weights (golden.safetensors is there without an index); expected one of model"),
        ("chat bare", "bare has no weights"),
        ("infill bare --text <mask>", "bare has no weights"),
        ("serve bare", "bare has no weights"),
        ("evaluate bare file", "bare has no weights"),
        ("export bare out --for sglang", "bare has no weights"),
        (f"verify {MODEL} bare", "bare has no weights"),
        (f"verify bare {MODEL}", "bare has no weights"),
        ("import bare out", "SOURCE=bare has no weights"),
        ("finetune --factory qwen3_8b_mdlm_finetune init_from=bare", "init_from=bare has no weights"),
        ("generate partial", "partial lacks shards that model.safetensors.index.json names: b.safetensors; fetch them"),
        ("import partial out", "SOURCE=partial lacks shards that"),
        ("generate file", "file is a file; name the folder of a run or of a checkpoint"),
        ("generate run", "run/checkpoints holds no complete checkpoint; train on, or name another run"),
        (f"generate {MODEL} --best", f"--best chooses among the checkpoints of a run, and {MODEL} is no run"),
    ],
)
def test_a_folder_without_a_checkpoint_is_told_before_nemo_is_imported(monkeypatch, capsys, tmp_path, command, error):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "run" / "checkpoints" / "cut_short" / "weights").mkdir(parents=True)
    for folder, files in {"bare": ("golden.safetensors",), "partial": ("a.safetensors",)}.items():
        (tmp_path / folder).mkdir()
        for file in ("config.json", *files):
            (tmp_path / folder / file).touch()
    index = {"weight_map": {"one": "a.safetensors", "two": "b.safetensors"}}
    (tmp_path / "partial" / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["nemo-dllm", *command.split()])
    monkeypatch.setattr(cli, "_import", lambda *_: pytest.fail("imported NeMo"))
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err.startswith(f"error: {error}")


@pytest.mark.parametrize("index", ["not json", "[]", "{}", '{"weight_map": 1}'])
def test_an_index_that_cannot_be_read_is_left_to_the_loading(tmp_path, index):
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert checkpoint_kind(tmp_path) is CheckpointKind.HUGGING_FACE


@pytest.mark.parametrize("model", sorted(path.name for path in MODELS.iterdir()))
def test_checkpoints_of_all_layouts_have_weights(model):
    check_hf_weights(MODELS / model)
