"""Checkpoints for the tests of inference."""

import json
import shutil
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[1] / "golden" / "models"


@pytest.fixture(scope="session")
def hf_folder():
    """A Hugging Face checkpoint of a masked diffusion model: 200 tokens, of which 196 is the mask token."""
    return MODELS / "a2d_qwen3"


@pytest.fixture(scope="session")
def autoregressive_folder():
    """A Hugging Face checkpoint of an autoregressive model."""
    return MODELS / "qwen3"


@pytest.fixture(scope="session")
def nemo_folder(single_process, hf_folder, tmp_path_factory):
    """The NeMo checkpoint that an import of ``hf_folder`` writes."""
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config
    from nemo_dllm.connectors.hf_import import import_hf_checkpoint

    model = MDLMModel(hf_to_nemo_config(hf_folder), MaskedDiffusion())
    return import_hf_checkpoint(model, hf_folder, tmp_path_factory.mktemp("nemo") / "imported")


@pytest.fixture(scope="session")
def model(single_process, hf_folder):
    """``hf_folder``, loaded."""
    from nemo_dllm.collections.diffusion.inference import load_checkpoint

    return load_checkpoint(hf_folder)


@pytest.fixture(scope="session")
def command():
    """Gives the function of a command, with what its command line gives it where nothing is said."""
    from nemo_dllm.cli.sampling import COMMANDS, REQUIRED

    def find(name):
        (command,) = (command for command in COMMANDS if command.name == name)
        defaults = {option.name: option.default for option in command.own if option.default is not REQUIRED}
        return partial(getattr(import_module(f"nemo_dllm.{command.module}"), name), **defaults)

    return find


@pytest.fixture
def evaluate(single_process, command):
    """The command ``evaluate``."""
    return command("evaluate")


@pytest.fixture
def hf_twin(hf_folder, tmp_path):
    """Copies ``hf_folder``, leaves out the named files, and sets fields of its config.json."""

    def make(without=(), **fields):
        twin = tmp_path / "twin"
        shutil.copytree(hf_folder, twin, ignore=shutil.ignore_patterns(*without))
        config = json.loads((twin / "config.json").read_text())
        (twin / "config.json").write_text(json.dumps(config | fields))
        return twin

    return make
