import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_dllm.connectors.safetensors_writer import SafetensorsFile, TensorHeader
from nemo_dllm.connectors.shard_layout import (
    SAFETENSORS_INDEX,
    ShardLayout,
    plan_shards,
    read_shard_layout,
    size_in_bytes,
)

TENSORS = {"a": torch.ones(4), "b": torch.ones(2, 3), "c": torch.ones(5, dtype=torch.bfloat16)}  # 16, 24, 10 bytes
HEADERS = {name: TensorHeader.of(tensor) for name, tensor in TENSORS.items()}
# Spaces, order and a further field as no program of ours writes them.
INDEX = '{"weight_map": {"c": "y.safetensors", "b": "x.safetensors", "a": "y.safetensors"}, "by": 1, "metadata": {}}'


def layout(**metadata):
    return ShardLayout(INDEX.replace('"metadata": {}', f'"metadata": {json.dumps(metadata)}'), num_bytes=50)


def test_files_are_those_of_the_library_byte_for_byte(tmp_path):
    save_file(TENSORS, tmp_path / "library", metadata={"format": "pt"})
    ours = SafetensorsFile(tmp_path / "ours", HEADERS)
    for name in ("c", "a", "b"):
        ours.write(name, TENSORS[name])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "library").read_bytes()


@pytest.mark.parametrize("wrong", [torch.ones(5), torch.ones(4, dtype=torch.float16)])
def test_a_tensor_must_be_as_its_header_says(tmp_path, wrong):
    with pytest.raises(AssertionError, match="a is not as its header says"):
        SafetensorsFile(tmp_path / "file", HEADERS).write("a", wrong)


@pytest.mark.parametrize("total", [{}, {"total_size": 50}, {"total_size": 999, "format": "pt"}])
def test_equal_tensors_keep_files_and_index_byte_for_byte(total):
    plan = plan_shards(HEADERS, layout(**total))
    assert plan.files == {"x.safetensors": ["b"], "y.safetensors": ["a", "c"]}
    assert plan.index.decode() == layout(**total).index


def test_other_sizes_keep_files_and_change_the_totals():
    grown = HEADERS | {"b": TensorHeader(torch.float32, (4, 3))}
    plan = plan_shards(grown, layout(total_size=50, total_parameters=15, format="pt"))
    index = json.loads(plan.index)
    assert index["metadata"] == {"total_size": 74, "total_parameters": 21, "format": "pt"}
    assert plan.files == plan_shards(HEADERS, layout()).files
    assert list(index["weight_map"]) == ["c", "b", "a"] and index["by"] == 1


def test_tensors_that_are_not_written_leave_the_index():
    plan = plan_shards({name: HEADERS[name] for name in "ac"}, layout(total_size=50))
    assert plan.files == {"y.safetensors": ["a", "c"]}
    assert json.loads(plan.index)["weight_map"] == {"c": "y.safetensors", "a": "y.safetensors"}
    assert json.loads(plan.index)["metadata"] == {"total_size": 26}


@pytest.mark.parametrize("metadata", [None, [], "total_size"])
def test_an_index_whose_metadata_say_nothing(metadata):
    index = json.loads(layout().index) | {"metadata": metadata}
    plan = plan_shards({"a": HEADERS["a"]}, ShardLayout(json.dumps(index), num_bytes=50))
    assert json.loads(plan.index) == index | {"weight_map": {"a": "y.safetensors"}}


def test_another_model_and_a_given_size_have_shards_of_their_own():
    other = HEADERS | {"d": HEADERS["a"]}
    assert plan_shards(other, layout()) == plan_shards(other, None)
    assert list(plan_shards(HEADERS, layout(), 40).files) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    single = ShardLayout(None, num_bytes=50)
    assert len(plan_shards(HEADERS, single, 1).files) == 3
    assert plan_shards(HEADERS, single) == ({"model.safetensors": ["a", "b", "c"]}, None)


def test_reads_what_a_folder_has(models, tmp_path):
    found = read_shard_layout(models / "qwen3_sharded")
    assert found == ((models / "qwen3_sharded" / SAFETENSORS_INDEX).read_text(), 472832)
    tensors = load_file(models / "qwen3" / "model.safetensors")
    assert read_shard_layout(models / "qwen3") == (None, sum(tensor.nbytes for tensor in tensors.values()))
    assert read_shard_layout(models / "qwen3_bin") is None


@pytest.mark.parametrize("file", ["../out.safetensors", "pytorch_model-00001-of-00001.bin"])
def test_files_that_no_export_may_write_are_no_layout(models, tmp_path, file):
    folder = shutil.copytree(models / "qwen3_sharded", tmp_path / "source")
    index = json.loads((folder / SAFETENSORS_INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], file)
    (folder / SAFETENSORS_INDEX).write_text(json.dumps(index))
    assert read_shard_layout(folder) is None


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (7, 7),
        (1.5e5, 150_000),
        ("123", 123),
        ("5GB", 5 * 10**9),
        ("1.5 mb", 1_500_000),
        ("2 GiB", 2**31),
        ("3KB", 3000),
    ],
)
def test_sizes_of_files(size, expected):
    assert size_in_bytes(size) == expected


@pytest.mark.parametrize("size", [0, -5, "", "5 XB", "GB", "-1GB", "0.1", "big"])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match=f"max_shard_size={size!r} is no size of files; give bytes or a number with"):
        size_in_bytes(size)
