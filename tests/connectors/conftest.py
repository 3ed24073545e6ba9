"""Checkpoint folders for the connectors' tests: golden ones, and twins of them with one thing changed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

MODELS = Path(__file__).parents[1] / "golden" / "models"
WEIGHTS = "model.safetensors"
BLOCK_SIZE = 4
# Not what a model of ours gives: shifted afterwards, of routers, and of padding that the public class takes for causal.
NO_LOGITS = ("logits_shifted", "router_logits", "quirk_padded2d_logits")


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


@pytest.fixture(scope="session")
def load(build_core):
    """Builds the Megatron model of a checkpoint folder and fills it."""
    from nemo_dllm.connectors.load import load_hf_weights

    def load(path, *args, **fields):
        core = build_core(path, *args, **fields)
        load_hf_weights(core, path)
        return core

    return load


@pytest.fixture(scope="session")
def logit_errors():
    """Largest difference of a model to each golden tensor of logits, by its name."""
    return _logit_errors


def _attention_of(case, causal_family):
    """Pattern of a golden tensor of logits, given a key mask or None; None stands for bidirectional attention."""
    from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal

    if case == "block_logits":
        return lambda keys: BlockCausal(BLOCK_SIZE, keys)
    if case.endswith("_causal") or (causal_family and not case.endswith("_bidirectional")):
        return lambda keys: BlockCausal(1, keys)
    return Bidirectional


@torch.no_grad()
def _logit_errors(core, golden):
    """Largest difference to each golden tensor of logits, at the real tokens."""
    errors = {}
    for case, expected in golden.items():
        if "logits" not in case or case in NO_LOGITS:
            continue
        tokens, positions, keys = golden["input_ids"], None, None
        if case.startswith("padded_"):
            tokens, keys = golden["padded_input_ids"], golden["padded_attention_mask"].bool()
        if case.startswith("pos_"):
            positions = golden["pos_position_ids"]
        pattern = _attention_of(case, "logits_bidirectional" in golden)(keys)
        difference = (core(tokens, positions, pattern) - expected).abs()
        errors[case] = (difference if keys is None else difference[keys]).max().item()
    return errors
