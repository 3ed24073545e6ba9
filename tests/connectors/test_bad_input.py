"""What a checkpoint folder may hold that must not pass, and what a conversion that fails leaves behind."""

import json
import os
import resource
import shutil
import signal
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_dllm.connectors.checkpoint_files import HFCheckpoint, write_hf_checkpoint
from nemo_dllm.connectors.facts import read_facts
from nemo_dllm.connectors.safetensors_writer import TensorHeader
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def edit_json(file, **fields):
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def add_code(folder, name, marker):
    """A Python file that leaves a marker if it is ever run."""
    (folder / f"{name}.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")


def test_an_unknown_model_type_lists_the_known_ones(make_twin):
    twin = make_twin("qwen3", model_type="qwen9", architectures=["Qwen9ForCausalLM"])
    with pytest.raises(ValueError, match=r"model_type='qwen9' .* no known family; known: qwen3 \(Qwen3ForCausalLM\), "):
        read_facts(twin)


def test_a_tensor_in_two_shards(models, tmp_path):
    twin = shutil.copytree(models / "qwen3_sharded", tmp_path / "twin")
    first, second = (load_file(twin / shard) for shard in SHARDS)
    repeated = sorted(first)[:2]
    save_file(second | {name: first[name] for name in repeated}, twin / SHARDS[1])
    expected = ", ".join(f"{name} in {SHARDS[0]} and {SHARDS[1]}" for name in repeated)
    with pytest.raises(ValueError, match=f"has tensors in more than one shard: {expected}; fetch it again"):
        HFCheckpoint(twin)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "3", '"x"', pytest.param("[" * 100_000, id="deep")])
@pytest.mark.parametrize(
    "name", ["config.json", INDEX, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"]
)
def test_a_small_file_that_is_no_json_object_is_named(models, tmp_path, name, content):
    twin = shutil.copytree(models / "qwen3_sharded", tmp_path / "twin")
    (twin / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} (is no valid JSON|holds no JSON object)"):
        read_facts(twin)


@pytest.mark.parametrize("weight_map", [3, ["a"], {}, {"a": 3}, {"a": None}])
def test_an_index_without_files_of_tensors(models, tmp_path, weight_map):
    twin = shutil.copytree(models / "qwen3_sharded", tmp_path / "twin")
    edit_json(twin / INDEX, weight_map=weight_map)
    with pytest.raises(ValueError, match=f"{INDEX} has no weight_map from tensors to files"):
        HFCheckpoint(twin)


def test_all_damaged_shards_are_named(models, tmp_path):
    twin = shutil.copytree(models / "qwen3_sharded", tmp_path / "twin")
    for shard, content in zip(SHARDS, (b"", b"<html>not found</html>"), strict=True):
        (twin / shard).write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s){SHARDS[0]} is truncated or damaged.*{SHARDS[1]} is truncated or dam"):
        HFCheckpoint(twin)


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_damaged_tokenizer_is_named(models, tmp_path, content):
    twin = shutil.copytree(models / "qwen3", tmp_path / "twin")
    (twin / "tokenizer.json").write_text(content)
    with pytest.raises(
        ValueError, match=r"tokenizer\.json (is no valid|holds no) JSON|tokenizer files of .*twin cannot"
    ):
        read_facts(twin)


@pytest.mark.parametrize(
    "content", [{1: torch.zeros(1)}, {"a": {"b": torch.zeros(1)}}, [torch.zeros(1)], torch.zeros(1)]
)
def test_a_pickle_of_something_else(models, tmp_path, content):
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged or no state dict of tensors"):
        HFCheckpoint(tmp_path)


@pytest.mark.parametrize("zip_format", [True, False])
def test_a_pickle_that_was_cut_off(models, tmp_path, zip_format):
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(load_file(models / "qwen3" / "model.safetensors"), file, _use_new_zipfile_serialization=zip_format)
    content = file.read_bytes()
    for end in range(0, len(content), len(content) // 40):
        file.write_bytes(content[:end])
        with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged or no state dict of tensors"):
            HFCheckpoint(tmp_path)


class Touch:
    """What unpickling it does."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mknod, (self.marker,)


@pytest.mark.parametrize("zip_format", [True, False])
def test_a_pickle_that_runs_code_is_not_run(models, tmp_path, zip_format):
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    content = {"model.norm.weight": torch.zeros(64), "other": Touch(str(tmp_path / "marker"))}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zip_format)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged or no state dict of tensors"):
        HFCheckpoint(tmp_path)
    assert not (tmp_path / "marker").exists()


@pytest.fixture
def with_remote_code(models, tmp_path):
    """A folder whose model and tokenizer are published as code."""
    folder = shutil.copytree(models / "dream", tmp_path / "remote")
    for name in ("modeling_dream", "configuration_dream", "tokenization_dream"):
        add_code(folder, name, tmp_path / "marker")
    edit_json(
        folder / "tokenizer_config.json",
        tokenizer_class="DreamTokenizer",
        auto_map={"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
    )
    return folder


def test_a_tokenizer_published_as_code_is_read_from_its_json(with_remote_code, models, tmp_path):
    tokenizer = load_hf_tokenizer(with_remote_code)
    assert (
        tokenizer("w3 <|mask|> w5")["input_ids"] == load_hf_tokenizer(models / "dream")("w3 <|mask|> w5")["input_ids"]
    )
    assert tokenizer.mask_token_id == read_facts(with_remote_code).mask_token_id == 194
    assert not (tmp_path / "marker").exists()


def test_without_json_its_twin_in_transformers_reads_it(with_remote_code, tmp_path):
    (with_remote_code / "tokenizer.json").unlink()
    (with_remote_code / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (with_remote_code / "merges.txt").write_text("#version: 0.2\na b\n")
    edit_json(with_remote_code / "tokenizer_config.json", added_tokens_decoder={})
    assert load_hf_tokenizer(with_remote_code)("abb", add_special_tokens=False)["input_ids"] == [2, 1]
    edit_json(with_remote_code / "tokenizer_config.json", tokenizer_class="OtherTokenizer")
    with pytest.raises(
        ValueError, match=r"is code of the checkpoint \(OtherTokenizer\), which is never run, and there is"
    ):
        load_hf_tokenizer(with_remote_code)
    assert not (tmp_path / "marker").exists()


@pytest.fixture
def small_files():
    """Lets no file grow beyond some bytes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size=100_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(folder, tensors, drawn=None, **options):
    headers = {name: TensorHeader.of(tensor) for name, tensor in tensors.items()}
    return write_hf_checkpoint(folder, {}, headers, tensors.items() if drawn is None else drawn, **options)


def test_a_full_disk_leaves_no_export(small_files, tmp_path):
    small_files()
    with pytest.raises(OSError, match="out could not be written; is the disk full.*File too large"):
        write(tmp_path / "out", {"a": torch.zeros(100, 100), "b": torch.zeros(300, 300)})
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_leaves_no_checkpoint_and_the_next_one_nothing_of_it(tmp_path):
    tensors = {"a": torch.zeros(3), "b": torch.zeros(3)}

    def killed():
        yield "a", tensors["a"]
        os.kill(os.getpid(), signal.SIGKILL)
        yield "b", tensors["b"]

    child = os.fork()
    if child == 0:
        write(tmp_path / "out", tensors, killed(), max_shard_size=1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name == f".out.unfinished-{socket.gethostname()}-{child}"
    (left / "config.json").write_text("{}")  # As late as it can be.
    with pytest.raises(ValueError, match="is a conversion that did not end; convert again"):
        HFCheckpoint(left)
    assert HFCheckpoint(write(tmp_path / "out", tensors)).shapes == {"a": (3,), "b": (3,)}
    assert [folder.name for folder in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def import_folder(single_process):
    from nemo_dllm.connectors.conversion import import_checkpoint

    return import_checkpoint


@pytest.mark.nemo
def test_an_import_runs_no_code(import_folder, with_remote_code, tmp_path):
    from nemo.lightning import io

    imported = import_folder(with_remote_code, tmp_path / "nemo")
    tokenizer = io.load_context(imported, subpath="model").tokenizer
    assert (tokenizer.mask_id, tokenizer.text_to_ids("w3 w5")) == (194, [3, 5])
    # As it came, code and all.
    assert (imported / "context" / "hf" / "tokenization_dream.py").is_file()
    assert not (tmp_path / "marker").exists()


@pytest.mark.nemo
@pytest.mark.parametrize("size", [0, 1000, 100_000])
def test_a_full_disk_leaves_no_import(import_folder, models, small_files, tmp_path, size):
    small_files(size)
    with pytest.raises(OSError, match="could not be written; is the disk full"):
        import_folder(models / "qwen3", tmp_path / "nemo")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nemo
def test_a_diffusion_model_is_no_start_for_a2d(import_folder, models, tmp_path):
    for name, kind in (("a2d_qwen3", "MDLMModel"), ("sdar", "(BD3LMModel|MDLMModel)")):
        with pytest.raises(ValueError, match=f"is a diffusion model already .* autoregressive one; take {kind}"):
            import_folder(models / name, tmp_path / "nemo", kind="a2d")
    with pytest.raises(ValueError, match="kind='other' is unknown; choose from a2d, mdlm, bd3lm"):
        import_folder(models / "qwen3", tmp_path / "nemo", kind="other")
    assert list(tmp_path.iterdir()) == []
