"""How block diffusion was trained, told to samplers and later trainings by config.json."""

import json

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture
def exported(single_process, tmp_path):
    """Config.json of a checkpoint trained with some fields of block diffusion, and the folder of the export."""
    from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint
    from nemo_dllm.connectors.hf_import import import_hf_checkpoint

    def run(source, label="1", **fields):
        model = BD3LMModel(hf_to_nemo_config(source), BlockDiffusion(**fields))
        imported = import_hf_checkpoint(model, source, tmp_path / f"nemo{label}")
        folder = export_hf_checkpoint(imported, tmp_path / f"hf{label}")
        return json.loads((folder / "config.json").read_text()), folder

    return run


TOLD = ("block_size", "ar_loss_weight", "block_start")


@pytest.mark.parametrize("name", ["qwen3", "sdar"])
def test_defaults_are_not_written(exported, models, name):
    config, _ = exported(models / name, block_size=4)
    assert [field for field in TOLD if field in config] == ["block_size"]


@pytest.mark.parametrize("name", ["qwen3", "sdar"])
def test_what_differs_is_written_and_read_again(exported, models, name):
    from nemo_dllm.collections.diffusion.inference.load import load_checkpoint
    from nemo_dllm.connectors.conversion import diffusion_model

    fields = {"block_size": 8, "ar_loss_weight": 0.5, "block_start": "reference"}
    config, folder = exported(models / name, **fields)
    assert {field: config[field] for field in TOLD} == fields
    loaded = load_checkpoint(folder)
    model = diffusion_model(folder, kind="bd3lm")
    for objective in (loaded.objective, model.objective):
        assert {field: getattr(objective, field) for field in TOLD} == fields
    # Finished blocks attend causally, so only a cache can tell them from the block at hand.
    assert loaded.denoiser.causal_commits
    assert loaded.sampler_config().cache == "exact"
    # Trained on without the next-token loss, it is a common block diffusion model again.
    config, folder = exported(folder, "2", block_size=8)
    assert (config["ar_loss_weight"], config["block_start"]) == (0.0, "clean_prefix")
    assert not load_checkpoint(folder).denoiser.causal_commits


def test_a_block_start_that_there_is_not(models, make_twin):
    from nemo_dllm.connectors.conversion import diffusion_model

    with pytest.raises(ValueError, match="block_start='middle' is unknown; known: clean_prefix, reference"):
        diffusion_model(make_twin("sdar", block_start="middle"))
