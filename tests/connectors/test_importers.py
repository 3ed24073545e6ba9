"""Through NeMo's own import and export calls."""

import json
import shutil
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

pytestmark = pytest.mark.nemo

SUMMARY = "nemo_dllm_conversion.json"
# What stays as it is where a mask token is added to the tokenizer.
UNTOUCHED = ("generation_config.json",)
COMPANIONS = ("generation_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    connect = socket.socket.connect

    def refuse(self, address):
        assert self.family == socket.AF_UNIX, f"opened a connection to {address}"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def make_model(single_process, models):
    """An unbuilt model for a checkpoint folder."""
    from nemo_dllm.collections.diffusion.models.a2d import A2DModel
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config

    def make(path, kind="MDLMModel", optim=None, transformer_impl="auto", **objective):
        model_class = {"MDLMModel": MDLMModel, "A2DModel": A2DModel}[kind]
        config = hf_to_nemo_config(path)
        return model_class(config, MaskedDiffusion(**objective), optim=optim, transformer_impl=transformer_impl)

    return make


def import_ckpt(model, source, output_path, **kwargs):
    from nemo.collections import llm

    import nemo_dllm.connectors.importers  # noqa: F401

    return llm.import_ckpt(model, source=f"hf://{source}", output_path=output_path, **kwargs)


def export_ckpt(path, output_path, **kwargs):
    from nemo.collections import llm

    return llm.export_ckpt(path, target="hf", output_path=output_path, **kwargs)


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same_weights(left, right):
    left, right = (
        {name: t for file in folder.glob("model*.safetensors") for name, t in load_file(file).items()}
        for folder in (left, right)
    )
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype for name in left)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied", "qwen3_sharded"])
def test_an_autoregressive_checkpoint_comes_back_as_a_diffusion_model(make_model, models, tmp_path, name):
    imported = import_ckpt(make_model(models / name, "A2DModel"), models / name, tmp_path / "nemo")
    exported = export_ckpt(imported, tmp_path / "hf")
    assert_same_weights(exported, models / name)
    for file in UNTOUCHED:
        assert (exported / file).read_bytes() == (models / name / file).read_bytes()
    assert AutoTokenizer.from_pretrained(exported).mask_token_id == 196
    weights = {file.name: file.read_bytes() for file in (models / name).glob("model*")}
    assert {file.name: file.read_bytes() for file in exported.glob("model[.-]*")} == weights
    files = ["config.json", "modeling_a2d.py", SUMMARY, *weights, *COMPANIONS]
    assert sorted(file.name for file in exported.iterdir()) == sorted(files)
    source, config = read_config(models / name), read_config(exported)
    assert {key: value for key, value in config.items() if value != source.get(key, ...)} == {
        "model_type": "a2d-qwen3",
        "architectures": ["A2DQwen3LMHeadModel"],
        "auto_map": {
            "AutoConfig": "modeling_a2d.A2DQwen3Config",
            "AutoModel": "modeling_a2d.A2DQwen3LMHeadModel",
            "AutoModelForMaskedLM": "modeling_a2d.A2DQwen3LMHeadModel",
        },
        "mask_token_id": 196,
        "right_shift_logits": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    }


def test_a_diffusion_checkpoint_comes_back_as_it_was(make_model, make_twin, tmp_path):
    source = make_twin("a2d_qwen3", mask_token_id=17)
    exported = export_ckpt(import_ckpt(make_model(source), source, tmp_path / "nemo"), tmp_path / "hf")
    assert_same_weights(exported, source)
    for file in ("config.json", *COMPANIONS):
        assert (exported / file).read_bytes() == (source / file).read_bytes()


def test_special_ids_chat_template_and_unknown_fields_survive(make_model, make_twin, tmp_path):
    ids = {"bos_token_id": 11, "eos_token_id": [12, 13], "pad_token_id": 0, "mask_token_id": 14, "block_size": 4}
    twin = make_twin("a2d_qwen3", right_shift_logits=True, anything={"else": [1, None]}, **ids)
    (twin / "chat_template.jinja").write_text("{{ messages }}")
    model = make_model(twin, right_shift=True)
    exported = export_ckpt(import_ckpt(model, twin, tmp_path / "nemo"), tmp_path / "hf")
    assert read_config(exported) == read_config(twin)
    assert (exported / "chat_template.jinja").read_text() == "{{ messages }}"
    assert model.objective.mask_token_id == 14


def test_an_export_imports_again(make_model, models, tmp_path):
    model = make_model(models / "qwen3", mask_token_id=42, right_shift=True)
    first = export_ckpt(import_ckpt(model, models / "qwen3", tmp_path / "nemo1"), tmp_path / "hf1")
    assert (read_config(first)["mask_token_id"], read_config(first)["right_shift_logits"]) == (42, True)
    again = make_model(first, right_shift=True)
    second = export_ckpt(import_ckpt(again, first, tmp_path / "nemo2"), tmp_path / "hf2")
    assert again.objective.mask_token_id == 42
    assert read_config(second) == read_config(first)
    assert_same_weights(second, first)


def test_half_precision_stays(make_model, make_twin, tmp_path):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    twin = make_twin("qwen3", halve, torch_dtype="bfloat16")
    exported = export_ckpt(import_ckpt(make_model(twin), twin, tmp_path / "nemo"), tmp_path / "hf")
    assert_same_weights(exported, twin)
    assert read_config(exported)["torch_dtype"] == "bfloat16"


def test_export_in_shards(make_model, models, tmp_path):
    imported = import_ckpt(make_model(models / "qwen3"), models / "qwen3", tmp_path / "nemo")
    exported = export_ckpt(imported, tmp_path / "hf", max_shard_size=200_000)
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    assert_same_weights(exported, models / "qwen3")
    # A file for each tensor, and no less.
    exported = export_ckpt(imported, tmp_path / "small", max_shard_size="1KB")
    assert max(len(load_file(file)) for file in exported.glob("model-*.safetensors")) <= 4
    assert_same_weights(exported, models / "qwen3")
    with pytest.raises(ValueError, match="max_shard_size=0 is no size of files"):
        export_ckpt(imported, tmp_path / "none", max_shard_size=0)


def test_the_imported_context_has_the_mask_token(make_model, models, tmp_path):
    from nemo.lightning import io

    model = make_model(models / "qwen3")
    imported = import_ckpt(model, models / "qwen3", tmp_path / "nemo")
    context = io.load_context(imported, subpath="model")
    assert type(context) is type(model)
    for tokenizer in (context.tokenizer, model.tokenizer):
        assert tokenizer.mask_id == 196
        assert tokenizer.text_to_ids("w3 <|mask|> w5") == [3, 196, 5]
    assert context.objective.mask_token_id == model.objective.mask_token_id == 196
    assert json.loads((imported / "context" / "hf" / "nemo_dllm.json").read_text()) == {
        "family": "qwen3",
        "source": str(models / "qwen3"),
        "revision": None,
        "dtype": "float32",
        "attention": "causal",
        "right_shift": False,
        "block_size": None,
        "mask_token_id": 196,
        "mask_token_added": True,
        "special_token_ids": {"bos_token_id": 191, "eos_token_id": 192, "pad_token_id": 191},
        "other_dtypes": {},
        "repeats_head": False,
        "ar_loss_weight": 0.0,
        "block_start": "clean_prefix",
    }


def test_the_objective_s_mask_token_wins(make_model, models, tmp_path):
    from nemo.lightning import io

    model = make_model(models / "qwen3", mask_token_id=17)
    imported = import_ckpt(model, models / "qwen3", tmp_path / "nemo")
    context = io.load_context(imported, subpath="model")
    assert context.objective.mask_token_id == model.objective.mask_token_id == 17
    # Text may use it.
    assert context.tokenizer.ids_to_text(context.tokenizer.text_to_ids("w16 w17")) == "w16 w17"
    exported = export_ckpt(imported, tmp_path / "hf")
    assert read_config(exported)["mask_token_id"] == 17
    for file in COMPANIONS:
        assert (exported / file).read_bytes() == (models / "qwen3" / file).read_bytes()


def test_without_a_tokenizer(make_model, make_twin, tmp_path):
    twin = make_twin("qwen3")
    for file in twin.glob("*token*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"has no mask token.*set mask_token_id of the objective"):
        import_ckpt(make_model(twin), twin, tmp_path / "nemo")
    assert not (tmp_path / "nemo").exists()
    imported = import_ckpt(make_model(twin, mask_token_id=196), twin, tmp_path / "nemo")
    exported = export_ckpt(imported, tmp_path / "hf")
    assert_same_weights(exported, twin)
    assert read_config(exported)["mask_token_id"] == 196
    assert (exported / "generation_config.json").read_bytes() == (twin / "generation_config.json").read_bytes()


def test_the_export_needs_neither_the_source_nor_the_place_of_the_import(make_model, make_twin, models, tmp_path):
    twin = make_twin("a2d_qwen3")
    import_ckpt(make_model(twin), twin, tmp_path / "nemo")
    shutil.rmtree(twin)
    moved = (tmp_path / "nemo").rename(tmp_path / "moved")
    exported = export_ckpt(moved, tmp_path / "hf")
    assert read_config(exported) == read_config(models / "a2d_qwen3") | {"mask_token_id": 196}
    assert_same_weights(exported, models / "a2d_qwen3")


def test_a_model_that_contradicts_the_checkpoint_is_refused(make_model, models, tmp_path):
    for name, error in (
        ("qwen3_tied", "num_layers=2 .checkpoint: 3., share_embeddings_and_output_weights=True .checkpoint: False"),
        ("a2d_qwen3", "share_embeddings_and_output_weights=True"),
    ):
        with pytest.raises(ValueError, match=error):
            import_ckpt(make_model(models / name), models / "qwen3", tmp_path / "nemo")
    with pytest.raises(ValueError, match=r"right_shift=True of the objective contradicts .*a2d_qwen3"):
        import_ckpt(make_model(models / "a2d_qwen3", right_shift=True), models / "a2d_qwen3", tmp_path / "nemo")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_import_leaves_nothing(make_model, make_twin, tmp_path):
    def damage(tensors):
        tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = float("nan")

    twin = make_twin("qwen3", damage)
    with pytest.raises(ValueError, match="down_proj.weight holds NaN"):
        import_ckpt(make_model(twin), twin, tmp_path / "nemo")
    assert [folder.name for folder in tmp_path.iterdir()] == ["twin"]


def test_existing_folders_stay_unless_overwritten(make_model, models, tmp_path):
    model = make_model(models / "qwen3")
    imported = import_ckpt(model, models / "qwen3", tmp_path / "nemo")
    with pytest.raises(FileExistsError):
        import_ckpt(model, models / "qwen3", imported)
    import_ckpt(make_model(models / "a2d_qwen3"), models / "a2d_qwen3", imported, overwrite=True)
    exported = export_ckpt(imported, tmp_path / "hf")
    with pytest.raises(FileExistsError, match="hf exists"):
        export_ckpt(imported, exported)
    export_ckpt(imported, exported, overwrite=True)
    assert_same_weights(exported, models / "a2d_qwen3")
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["hf", "nemo"]


def test_what_a_conversion_reads_is_not_overwritten(make_model, make_twin, tmp_path):
    source = make_twin("qwen3", folder="models/source")
    for output in (source, source.parent):
        with pytest.raises(ValueError, match="cannot be replaced: .*source, which is read, is in it"):
            import_ckpt(make_model(source), source, output, overwrite=True)
    imported = import_ckpt(make_model(source), source, tmp_path / "run" / "nemo")
    for output in (imported, imported.parent):
        with pytest.raises(ValueError, match="cannot be replaced: .*nemo, which is read, is in it"):
            export_ckpt(imported, output, overwrite=True)
    with pytest.raises(ValueError, match="mask_init='other' is unknown; choose from mean, random, zero"):
        import_ckpt(make_model(source), source, tmp_path / "other", mask_init="other")


def test_an_import_that_exists_is_used(make_model, models, tmp_path):
    """As NeMo does with imports in its model cache."""
    import nemo_dllm.connectors.importers  # noqa: F401

    first = make_model(models / "qwen3")
    path = first.import_ckpt(f"hf://{models / 'qwen3'}", base_path=tmp_path)
    written = (path / "weights" / "metadata.json").stat().st_mtime_ns
    second = make_model(models / "qwen3")
    assert second.import_ckpt(f"hf://{models / 'qwen3'}", base_path=tmp_path) == path
    assert (path / "weights" / "metadata.json").stat().st_mtime_ns == written
    assert (second.tokenizer.mask_id, second.objective.mask_token_id) == (196, 196)
    with pytest.raises(ValueError, match="num_layers=2"):
        make_model(models / "qwen3_tied").import_ckpt(f"hf://{models / 'qwen3'}", base_path=tmp_path)
    (tmp_path / "a2d_qwen3").mkdir()
    with pytest.raises(ValueError, match="is no import of a Hugging Face checkpoint"):
        make_model(models / "a2d_qwen3").import_ckpt(f"hf://{models / 'a2d_qwen3'}", base_path=tmp_path)


def test_wrong_kinds_of_folders_are_named(make_model, models, tmp_path):
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    with pytest.raises(ValueError, match="is a Hugging Face checkpoint; import it first"):
        export_hf_checkpoint(models / "qwen3", tmp_path / "hf")
    with pytest.raises(FileNotFoundError, match="is no NeMo checkpoint"):
        export_hf_checkpoint(tmp_path, tmp_path / "hf")
    imported = import_ckpt(make_model(models / "qwen3"), models / "qwen3", tmp_path / "nemo")
    adapters = shutil.copytree(imported, tmp_path / "adapters")
    metadata = {"model_ckpt_path": str(tmp_path / "gone")}
    (adapters / "weights" / "adapter_metadata.json").write_text(json.dumps(metadata))
    error = (
        "holds adapters of .*gone, which is no NeMo .* or write its new folder as model_ckpt_path into .*metadata.json"
    )
    with pytest.raises(FileNotFoundError, match=error):
        export_hf_checkpoint(adapters, tmp_path / "hf")
    with pytest.raises(ValueError, match="is a NeMo checkpoint"):
        import_ckpt(make_model(models / "qwen3"), imported, tmp_path / "again")
    with pytest.raises(FileNotFoundError, match="absent is not a folder"):
        import_ckpt(make_model(models / "qwen3"), tmp_path / "absent", tmp_path / "again")


def test_a_name_that_the_hub_cannot_give_is_an_error(make_model, models, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="nobody/nothing is neither a folder nor could it be fetched"):
        import_ckpt(make_model(models / "qwen3"), "nobody/nothing", tmp_path / "nemo")


def test_a_pickle_checkpoint_imports(make_model, models, tmp_path):
    source = shutil.copytree(models / "qwen3", tmp_path / "bin")
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    exported = export_ckpt(import_ckpt(make_model(source), source, tmp_path / "nemo"), tmp_path / "hf")
    assert_same_weights(exported, models / "qwen3")


def test_a_model_without_an_origin_gets_its_files_from_configuration_and_tokenizer(make_model, models, tmp_path):
    """As one trained from scratch, whose tokenizer was no import's."""
    model = make_model(models / "qwen3_tied", right_shift=True)
    trained = import_ckpt(model, models / "qwen3_tied", tmp_path / "nemo")
    (trained / "context" / "hf" / "nemo_dllm.json").unlink()
    exported = export_ckpt(trained, tmp_path / "hf")
    config = read_config(exported)
    assert (config["model_type"], config["architectures"]) == ("a2d-qwen3", ["A2DQwen3LMHeadModel"])
    assert (config["mask_token_id"], config["right_shift_logits"], config["torch_dtype"]) == (196, True, "float32")
    assert (config["eos_token_id"], config["pad_token_id"], config["tie_word_embeddings"]) == (192, 191, True)
    assert AutoTokenizer.from_pretrained(exported).mask_token_id == 196
    assert_same_weights(exported, models / "qwen3_tied")
    again = make_model(exported, right_shift=True)
    assert_same_weights(export_ckpt(import_ckpt(again, exported, tmp_path / "nemo2"), tmp_path / "hf2"), exported)


def test_weight_files_are_no_companions(make_model, models, tmp_path):
    source = shutil.copytree(models / "qwen3_sharded", tmp_path / "sharded")
    save_file({"x": torch.zeros(1)}, source / "stray.safetensors")
    imported = import_ckpt(make_model(source), source, tmp_path / "nemo")
    names = sorted(file.name for file in (imported / "context" / "hf").iterdir())
    assert names == sorted(["config.json", "nemo_dllm.json", "nemo_dllm_shards.json", *COMPANIONS])
