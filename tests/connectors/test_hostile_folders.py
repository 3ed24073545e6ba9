"""Conversions between folders with odd names and odd contents, by several processes, and by one that is killed."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_dllm.connectors.checkpoint_files import HFCheckpoint, write_hf_checkpoint
from nemo_dllm.connectors.safetensors_writer import TensorHeader

pytestmark = pytest.mark.nemo


@pytest.fixture
def import_folder(single_process):
    from nemo_dllm.connectors.conversion import import_checkpoint

    return import_checkpoint


@pytest.fixture
def there_and_back(import_folder):
    """Imports a folder, and exports it; the same tensors must come back."""
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    def run(source, nemo, hf):
        assert import_folder(source, nemo) == Path(nemo)
        exported, original = HFCheckpoint(export_hf_checkpoint(nemo, hf)), HFCheckpoint(source)
        assert exported.shapes == original.shapes
        assert exported.config == original.config | {"mask_token_id": 196}
        assert all(torch.equal(exported.tensor(name), original.tensor(name)) for name in original.keys())  # noqa: SIM118
        return exported.path

    return run


def test_spaces_letters_of_all_kinds_and_patterns_in_paths(there_and_back, models, tmp_path):
    place = tmp_path / "mit Leerzeichen é 中 %s [x] #1"
    place.mkdir()
    source = shutil.copytree(models / "a2d_qwen3", place / "modèle {a} *")
    there_and_back(source, place / "nemo ü ?", place / "hf ü ?")
    assert sorted(file.name for file in place.iterdir()) == ["hf ü ?", "modèle {a} *", "nemo ü ?"]


def test_relative_paths_that_go_up(there_and_back, models, tmp_path, monkeypatch):
    (tmp_path / "here" / "deeper").mkdir(parents=True)
    shutil.copytree(models / "a2d_qwen3", tmp_path / "source")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    monkeypatch.chdir(tmp_path / "here")
    there_and_back("../link", "deeper/../nemo", "../hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "hf", "link", "source"]
    assert sorted(path.name for path in Path().iterdir()) == ["deeper", "nemo"]


def test_files_that_are_none_of_the_checkpoint(there_and_back, models, tmp_path):
    source = shutil.copytree(models / "a2d_qwen3", tmp_path / "source")
    for name in ("training_args.bin", "pytorch_model.bin", "model.gguf", "rng_state.pth", "._model.safetensors"):
        (source / name).write_bytes(b"\0junk")
    for folder in ("original", "onnx", ".git", "folder.json"):
        (source / folder).mkdir()
        (source / folder / "config.json").write_text("junk")
    os.mkfifo(source / "pipe.json")
    (source / "nowhere.json").symlink_to("/nowhere")
    exported = there_and_back(source, tmp_path / "nemo", tmp_path / "hf")
    added = {"nemo_dllm_conversion.json"}
    assert {file.name for file in exported.iterdir()} - added == {
        file.name for file in (models / "a2d_qwen3").iterdir() if file.name != "golden.safetensors"
    }


@pytest.fixture
def scattered(models, tmp_path):
    """A checkpoint with a shard per tensor."""
    source = shutil.copytree(
        models / "a2d_qwen3", tmp_path / "scattered", ignore=shutil.ignore_patterns("golden.safetensors")
    )
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors.items(), start=1):
        weight_map[name] = f"model-{number:05d}-of-{len(tensors):05d}.safetensors"
        save_file({name: tensor}, source / weight_map[name], metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    return source


def test_a_shard_per_tensor(there_and_back, scattered, tmp_path):
    exported = there_and_back(scattered, tmp_path / "nemo", tmp_path / "hf")
    index = "model.safetensors.index.json"
    assert json.loads((exported / index).read_text()) == json.loads((scattered / index).read_text())


def test_shards_without_their_index(scattered):
    (scattered / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights \(model-00001-of-.*, ... is there without an index\)"):
        HFCheckpoint(scattered)


def test_more_shards_than_a_process_may_have_open_files(tmp_path):
    import resource

    tensors = {f"tensor.{number}": torch.full((2,), float(number)) for number in range(200)}
    headers = {name: TensorHeader.of(tensor) for name, tensor in tensors.items()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        checkpoint = HFCheckpoint(
            write_hf_checkpoint(tmp_path / "out", {"a": 1}, headers, tensors.items(), max_shard_size=1)
        )
        assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(checkpoint.path.glob("*.safetensors"))) == 200


def test_tensors_that_share_bytes_of_a_shard(scattered):
    """One of them would be what the other one is."""
    header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]} for name, at in (("a", 0), ("b", 4))}
    encoded = json.dumps(header).encode()
    (scattered / "both.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(12))
    index = {"weight_map": {"a": "both.safetensors", "b": "both.safetensors"}}
    (scattered / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="both.safetensors is truncated or damaged"):
        HFCheckpoint(scattered)


def test_what_another_import_has_made_meanwhile_stays(import_folder, models, tmp_path, monkeypatch):
    from nemo_dllm.connectors import hf_import

    convert = hf_import._convert

    def be_overtaken(*arguments):
        tally = convert(*arguments)
        (tmp_path / "nemo" / "context").mkdir(parents=True)
        return tally

    monkeypatch.setattr(hf_import, "_convert", be_overtaken)
    with pytest.raises(FileExistsError, match="nemo has been made by another process meanwhile; use it"):
        import_folder(models / "a2d_qwen3", tmp_path / "nemo")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["nemo", "nemo/context"]


def test_nemos_import_takes_what_another_process_has_made_meanwhile(import_folder, models, tmp_path, monkeypatch):
    from nemo.collections import llm

    from nemo_dllm.connectors import hf_import
    from nemo_dllm.connectors.conversion import diffusion_model

    other = import_folder(models / "a2d_qwen3", tmp_path / "other")
    convert = hf_import._convert

    def be_overtaken(*arguments):
        shutil.copytree(other, tmp_path / "nemo")
        return convert(*arguments)

    monkeypatch.setattr(hf_import, "_convert", be_overtaken)
    model = diffusion_model(models / "a2d_qwen3")
    llm.import_ckpt(model, source=f"hf://{models / 'a2d_qwen3'}", output_path=tmp_path / "nemo")
    assert model.objective.mask_token_id == 196 and model.tokenizer.mask_id == 196
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nemo", "other"]


def test_a_killed_import_leaves_no_checkpoint_and_the_next_one_nothing_of_it(import_folder, models, tmp_path):
    from nemo_dllm.connectors import hf_import

    for _ in range(2):
        child = os.fork()
        if child == 0:
            hf_import.build_on_cpu = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            import_folder(models / "a2d_qwen3", tmp_path / "nemo")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        (left,) = tmp_path.iterdir()
        with pytest.raises(ValueError, match="is a conversion that did not end; convert again"):
            HFCheckpoint(left)
    import_folder(models / "a2d_qwen3", tmp_path / "nemo")
    assert [path.name for path in tmp_path.iterdir()] == ["nemo"]


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_may_not_be_read_is_not_called_damaged(models, tmp_path, file):
    source = shutil.copytree(models / "a2d_qwen3", tmp_path / "source")
    if file == "pytorch_model.bin":
        torch.save(load_file(source / "model.safetensors"), source / file)
        (source / "model.safetensors").unlink()
    source.chmod(0o755)
    (source / file).chmod(0)
    child = os.fork()
    if child == 0:
        os.chdir(source)  # The folders above it are the test's user's own.
        if os.geteuid() == 0:
            os.setuid(65534)
        try:
            HFCheckpoint(".")
        except PermissionError as error:
            os._exit(0 if file in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
