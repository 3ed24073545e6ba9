"""Checkpoint folders for the connectors' tests: golden ones, and twins of them with one thing changed."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

MODELS = Path(__file__).parents[1] / "golden" / "models"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder of the golden checkpoints."""
    return MODELS


@pytest.fixture
def make_twin(tmp_path):
    """Copies a golden checkpoint, lets a function change its tensors in place, and updates its config.json."""

    def make(name, change=lambda tensors: None, folder="twin", **config) -> Path:
        twin = tmp_path / folder
        shutil.copytree(MODELS / name, twin)
        tensors = load_file(twin / WEIGHTS)
        change(tensors)
        save_file(tensors, twin / WEIGHTS, metadata={"format": "pt"})
        edit_config(twin, **config)
        return twin

    return make


@pytest.fixture(scope="session")
def build_core(single_process):
    """Builds the Megatron model of a checkpoint folder, its weights NaN until they are loaded."""
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config

    def build(path, attention_backend="sdpa", tokenizer=None, transformer_impl="auto", **fields):
        config = hf_to_nemo_config(path)
        for name, value in fields.items():
            setattr(config, name, value)
        model = MDLMModel(
            config,
            MaskedDiffusion(mask_token_id=196),
            tokenizer=tokenizer,
            transformer_impl=transformer_impl,
            attention_backend=attention_backend,
        )
        model.configure_model()
        for parameter in model.module.parameters():
            parameter.data.fill_(float("nan"))
        return model.module.eval()

    return build


def edit_config(folder: Path, **fields) -> None:
    """Set fields of a config.json; ``...`` removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
