"""What names a model: a folder, or a repository of the Hub."""

from pathlib import Path

import pytest

from nemo_dllm.collections.diffusion.model_source import source_path


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "imported").mkdir(parents=True)
    for folder in ("models", "models/imported"):
        (tmp_path / folder / "config.json").touch()
    (tmp_path / "models" / "model.gguf").touch()
    return tmp_path


@pytest.mark.parametrize("source", ["models", "./models", "models/imported", "hf://models/imported", Path("models")])
def test_a_folder(source):
    assert source_path(source) == Path(str(source).removeprefix("hf://"))


def test_a_path_behind_hf(here):
    assert source_path(f"hf://{here}/models") == here / "models"
    with pytest.raises(FileNotFoundError, match="^source=hf:///nosuch/model is no folder"):
        source_path("hf:///nosuch/model")


@pytest.mark.parametrize("source", ["Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B", "hf://gpt2", "models/nosuch"])
def test_a_name_of_a_repository_is_left_to_the_hub(source):
    assert source_path(source) == Path(source.removeprefix("hf://"))


@pytest.mark.parametrize(
    "source",
    ["nosuch", "./nosuch/model", "../nosuch", "~/models", "/nosuch", "a/b/c", "hf://a/b/c", "-a/b", "a/b ", ""],
)
def test_what_is_no_name_of_a_repository_is_told_at_once(source):
    with pytest.raises(FileNotFoundError, match=f"^path={source} is no folder .*, as OWNER/NAME or hf://NAME$"):
        source_path(source, "path")


def test_a_near_name_is_proposed():
    with pytest.raises(FileNotFoundError, match="did you mean models/imported, or a model of the Hugging Face Hub"):
        source_path("./models/importd")


def test_a_file_is_no_folder():
    with pytest.raises(
        NotADirectoryError, match="^source=models/model.gguf is a file; name the folder that it lies in"
    ):
        source_path("models/model.gguf")


def test_a_folder_without_a_model_is_told(here):
    (here / "texts").mkdir()
    with pytest.raises(FileNotFoundError, match="^init_from=texts holds no model; name the folder of a Hugging Face"):
        source_path("texts", "init_from")
    (here / "runs" / "mine" / "checkpoints").mkdir(parents=True)
    said = "^source=runs/mine is the folder of a run; name one of its checkpoints, in runs/mine/checkpoints$"
    with pytest.raises(FileNotFoundError, match=said):
        source_path("runs/mine")
    (here / "texts" / "context").mkdir()
    assert source_path("texts") == Path("texts")


def test_weights_are_needed_where_they_are_asked_for(here):
    assert source_path("models") == Path("models")
    with pytest.raises(FileNotFoundError, match="^init_from=models has no weights; expected one of model.safetensors"):
        source_path("models", "init_from", with_weights=True)
    (here / "models" / "context").mkdir()
    assert source_path("models", with_weights=True) == Path("models")
