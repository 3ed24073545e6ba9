"""Where adapters find their base model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.nemo


@pytest.fixture
def run(tmp_path):
    """The folder of a run with one checkpoint of adapters, whose base is in the folder of the run."""
    base = tmp_path / "run" / "start" / "0123" / "base"
    weights = tmp_path / "run" / "checkpoints" / "last" / "weights"
    for folder in (base / "weights", weights):
        folder.mkdir(parents=True)
    (base / "weights" / ".metadata").touch()
    (weights / "adapter_metadata.json").write_text(json.dumps({"model_ckpt_path": str(base / "weights")}))
    return tmp_path / "run"


def last(run):
    return run / "checkpoints" / "last"


def test_in_the_folder_of_the_run_wherever_that_is(run, tmp_path):
    from nemo_dllm.connectors.base_model import base_of

    assert base_of(last(run)) == run / "start" / "0123" / "base"
    moved = run.rename(tmp_path / "moved")
    assert base_of(last(moved)) == moved / "start" / "0123" / "base"
    # Of a copied run, the copy's.
    (tmp_path / "run").mkdir()
    assert base_of(last(moved)).is_relative_to(moved)


def test_a_checkpoint_that_left_its_run_finds_it_where_it_was(run, tmp_path):
    from nemo_dllm.connectors.base_model import base_of

    alone = last(run).rename(tmp_path / "alone")
    assert base_of(alone) == run / "start" / "0123" / "base"


def test_a_checkpoint_with_weights_of_its_own_has_none(run):
    from nemo_dllm.connectors.base_model import base_of

    (last(run) / "weights" / "adapter_metadata.json").unlink()
    assert base_of(last(run)) is None


def test_a_new_place_is_told_by_the_field_that_the_error_names(run, tmp_path):
    from nemo_dllm.connectors.base_model import base_of

    elsewhere = (run / "start" / "0123" / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(
        FileNotFoundError, match=r"0123/base, which is no NeMo .* as model_ckpt_path into (.*json)$"
    ) as e:
        base_of(last(run))
    metadata = str(e.value).rpartition(" ")[2]
    with open(metadata, "w") as file:
        json.dump({"model_ckpt_path": str(elsewhere)}, file)
    assert base_of(last(run)) == elsewhere


@pytest.mark.slow
def test_a_conversion_that_fails_says_why(models, tmp_path):
    from nemo_dllm.connectors.base_model import keep_base

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((models / "qwen3" / "config.json").read_bytes())
    tensors = load_file(models / "qwen3" / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(RuntimeError, match="source could not be converted .* model.norm.weight holds NaN"):
        keep_base(source, tmp_path, mask_token_id=196, mask_init="mean")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
