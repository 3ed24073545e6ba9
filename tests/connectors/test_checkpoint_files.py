import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_dllm.connectors.checkpoint_files import HFCheckpoint, write_hf_checkpoint
from nemo_dllm.connectors.safetensors_writer import TensorHeader

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(models, tmp_path):
    return shutil.copytree(models / "qwen3_sharded", tmp_path / "sharded")


def tensors_of(checkpoint):
    return {name: checkpoint.tensor(name) for name in checkpoint.keys()}  # noqa: SIM118


def assert_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_reads_config_shapes_and_tensors_of_a_single_file(models):
    checkpoint = HFCheckpoint(models / "qwen3")
    assert checkpoint.config["model_type"] == "qwen3"
    assert checkpoint.shapes["model.layers.0.mlp.gate_proj.weight"] == (112, 64)
    assert_equal(tensors_of(checkpoint), load_file(models / "qwen3" / "model.safetensors"))


def test_reads_all_shards_of_an_index(models):
    expected = {name: t for shard in SHARDS for name, t in load_file(models / "qwen3_sharded" / shard).items()}
    assert_equal(tensors_of(HFCheckpoint(models / "qwen3_sharded")), expected)


def test_reads_parts_of_tensors(models):
    checkpoint = HFCheckpoint(models / "qwen3")
    name = "model.layers.0.self_attn.o_proj.weight"
    whole = checkpoint.tensor(name)
    assert torch.equal(checkpoint.tensor(name, rows=slice(8, 24)), whole[8:24])
    assert torch.equal(checkpoint.tensor(name, columns=slice(64, 128)), whole[:, 64:])
    assert torch.equal(checkpoint.tensor(name, rows=slice(1, 2), columns=slice(3, 5)), whole[1:2, 3:5])


def test_reads_torch_pickles(models, tmp_path):
    tensors = load_file(models / "qwen3" / "model.safetensors")
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    for zip_format in (True, False):
        torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zip_format)
        assert_equal(tensors_of(HFCheckpoint(tmp_path)), tensors)


def test_refuses_pickles_of_anything_but_tensors(models, tmp_path):
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    torch.save({"weights": shutil.rmtree}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged or no state dict of tensors"):
        HFCheckpoint(tmp_path)


def test_ignores_weight_files_that_the_index_does_not_name(sharded):
    save_file({"model.norm.weight": torch.zeros(64)}, sharded / "model-quantised.safetensors")
    save_file({"model.norm.weight": torch.zeros(64)}, sharded / "model.safetensors")
    assert HFCheckpoint(sharded).tensor("model.norm.weight").abs().min() > 0


def test_names_all_absent_shards(sharded):
    for shard in SHARDS:
        (sharded / shard).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks shards that {INDEX} names: {', '.join(SHARDS)}"):
        HFCheckpoint(sharded)


def test_names_all_tensors_that_their_shards_lack(sharded):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] |= {"a.weight": SHARDS[0], "b.weight": SHARDS[1]}
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"shards lack: a.weight in {SHARDS[0]}, b.weight in {SHARDS[1]}"):
        HFCheckpoint(sharded)


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_names_a_truncated_file(sharded, keep):
    content = (sharded / SHARDS[1]).read_bytes()
    (sharded / SHARDS[1]).write_bytes(content[:keep])
    with pytest.raises(ValueError, match=f"{SHARDS[1]} is truncated or damaged"):
        HFCheckpoint(sharded)


def test_names_a_file_that_git_lfs_has_to_fetch(sharded):
    (sharded / SHARDS[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match=f"{SHARDS[1]} only points to the weights, .* `git lfs pull`"):
        HFCheckpoint(sharded)


@pytest.mark.parametrize("all_named", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_names_the_tensors_that_are_not_finite(make_twin, value, all_named):
    def damage(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][5, 5] = value
        if all_named:
            tensors["lm_head.weight"][0, 0] = value

    checkpoint = HFCheckpoint(make_twin("qwen3", damage))
    assert checkpoint.tensor("model.layers.1.mlp.up_proj.weight", rows=slice(0, 5)).isfinite().all()
    names = ["lm_head.weight"] * all_named + ["model.layers.1.mlp.up_proj.weight"]
    expected = rf"model\.safetensors: {', '.join(names)} hold{'' if all_named else 's'} NaN or infinity; the checkpoint"
    with pytest.raises(ValueError, match=expected):
        checkpoint.tensor("model.layers.1.mlp.up_proj.weight")


def test_tells_what_is_wrong_with_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent is not a folder"):
        HFCheckpoint(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        HFCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no valid JSON"):
        HFCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"has no weights; expected one of model\.safetensors\.index\.json"):
        HFCheckpoint(tmp_path)
    (tmp_path / "context").mkdir()
    with pytest.raises(ValueError, match="is a NeMo checkpoint; export it"):
        HFCheckpoint(tmp_path)


TENSORS = {f"t{i}": torch.arange(10.0) + i for i in range(5)}  # 40 bytes each
HEADERS = {name: TensorHeader.of(tensor) for name, tensor in TENSORS.items()}


def test_writes_one_file_and_what_it_holds(tmp_path):
    folder = write_hf_checkpoint(tmp_path / "out", {"a": 1}, HEADERS, TENSORS.items(), extra_files={"x.txt": b"x"})
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "x.txt"]
    assert HFCheckpoint(folder).config == {"a": 1}
    assert_equal(tensors_of(HFCheckpoint(folder)), TENSORS)


def test_index_lists_what_the_shards_hold(tmp_path):
    folder = write_hf_checkpoint(tmp_path / "out", {}, HEADERS, TENSORS.items(), max_shard_size=100)
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"] == {"total_size": 200}
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", *shards, INDEX]
    on_disk = {name: shard for shard in shards for name in load_file(folder / shard)}
    assert index["weight_map"] == on_disk
    assert_equal(tensors_of(HFCheckpoint(folder)), TENSORS)


def test_a_tensor_above_the_shard_size_has_its_own_file(tmp_path):
    folder = write_hf_checkpoint(tmp_path / "out", {}, HEADERS, TENSORS.items(), max_shard_size=1)
    assert len(list(folder.glob("*.safetensors"))) == len(TENSORS)


@pytest.mark.parametrize("max_shard_size", [1, 100, 1000])
def test_tensors_may_come_in_any_order(tmp_path, max_shard_size):
    folders = [
        write_hf_checkpoint(
            tmp_path / f"{step}", {}, HEADERS, [*TENSORS.items()][::step], max_shard_size=max_shard_size
        )
        for step in (1, -1)
    ]
    assert_equal(tensors_of(HFCheckpoint(folders[1])), TENSORS)
    left, right = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert left == right


def test_every_tensor_must_come(tmp_path):
    with pytest.raises(AssertionError, match="never written: t4"):
        write_hf_checkpoint(tmp_path / "out", {}, HEADERS, list(TENSORS.items())[:-1])
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_stays_as_it_is(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(FileExistsError, match="exists; choose another folder or pass overwrite=True"):
        write_hf_checkpoint(tmp_path / "out", {}, {}, ())
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "mine"]


def test_overwrite_replaces_the_whole_folder(tmp_path):
    for content in ({"a": 1}, {"b": 2}):
        folder = write_hf_checkpoint(
            tmp_path / "out", content, HEADERS, TENSORS.items(), extra_files={f"{len(content)}": b""}, overwrite=True
        )
    assert HFCheckpoint(folder).config == {"b": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_on_the_way_leaves_nothing_new(tmp_path, overwrite):
    if overwrite:
        write_hf_checkpoint(tmp_path / "out", {"old": 1}, HEADERS, TENSORS.items())

    def failing():
        yield from TENSORS.items()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hf_checkpoint(tmp_path / "out", {}, HEADERS, failing(), max_shard_size=100, overwrite=overwrite)
    assert [file.name for file in tmp_path.iterdir()] == (["out"] if overwrite else [])
    if overwrite:
        assert HFCheckpoint(tmp_path / "out").config == {"old": 1}


def test_no_folder_can_be_loaded_before_the_last_tensor_is_written(tmp_path):
    """What a kill would leave behind, at every tensor."""
    folders = []

    def watched():
        for item in TENSORS.items():
            folders.append([file for file in tmp_path.rglob("*") if file.name == "config.json"])
            yield item

    write_hf_checkpoint(tmp_path / "out", {}, HEADERS, watched(), max_shard_size=1)
    assert folders == [[]] * len(TENSORS)
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize("elsewhere", ["../other.safetensors", "/etc/model.safetensors"])
def test_an_index_that_names_other_folders(sharded, elsewhere):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] |= {"a.weight": elsewhere}
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"names files outside of its folder: {elsewhere}"):
        HFCheckpoint(sharded)
