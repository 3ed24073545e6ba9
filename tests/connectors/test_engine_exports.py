"""Folders for serving engines: what is written for whom, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_dllm.connectors.engine_layouts import LMDEPLOY, SGLANG
from nemo_dllm.connectors.engines import ALGORITHM_FILE, ENGINES, export_for_engine
from nemo_dllm.connectors.families.registry import FAMILIES

pytestmark = pytest.mark.nemo

MASKS = {"sdar": 151669, "sdar_moe": 151669, "llada2_moe": 156895}
SERVED = [("sdar", "sglang"), ("sdar", "lmdeploy"), ("sdar_moe", "sglang"), ("sdar_moe", "lmdeploy")]
SERVED += [("llada2_moe", "sglang")]


@pytest.fixture
def imported(single_process, models, tmp_path):
    """Name of a golden checkpoint, and import options -> its NeMo checkpoint."""
    from nemo_dllm.connectors.conversion import import_checkpoint

    return lambda source, **options: import_checkpoint(
        source if isinstance(source, Path) else models / source, tmp_path / "nemo", **options
    )


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("name, engine", SERVED)
def test_a_nemo_checkpoint_and_its_export_give_the_same(imported, models, tmp_path, name, engine):
    from_nemo = export_for_engine(imported(name), tmp_path / "a", engine)
    from_hf = export_for_engine(models / name, tmp_path / "b", engine)
    golden, config = load_file(models / name / "model.safetensors"), config_of(from_nemo.path)
    assert config == config_of(from_hf.path)
    for exported in (from_nemo, from_hf):
        tensors = load_file(exported.path / "model.safetensors")
        assert tensors.keys() == golden.keys() and all(torch.equal(tensors[key], golden[key]) for key in golden)
        layout = ENGINES[engine].layouts[config["architectures"][0]]
        assert layout.fields <= config.keys()
        assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == layout.shapes(config)
        assert str(exported.path) in exported.command
        assert any(str(MASKS[name]) in note for note in exported.notes)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["sdar", "llada2_moe"])
def test_transformers_reads_the_configuration_offline(models, tmp_path, name):
    """Engines ask ``AutoConfig``; the golden checkpoints name code that they do not have."""
    folder = export_for_engine(models / name, tmp_path / "out", "sglang").path
    script = (
        "import sys, json; from transformers import AutoConfig; "
        "c = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True); "
        "print(json.dumps([c.model_type, c.architectures, c.head_dim, c.rope_theta, c.eos_token_id]))"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    config = config_of(folder)
    fields = ("model_type", "architectures", "head_dim", "rope_theta")
    assert json.loads(done.stdout)[:4] == [config[field] for field in fields]


def test_code_that_a_checkpoint_brings_is_kept(make_twin, tmp_path):
    source = make_twin("sdar", auto_map={"AutoConfig": "own.Own", "AutoModel": "absent.Model"})
    (source / "own.py").write_text("class Own: ...\n")
    folder = export_for_engine(source, tmp_path / "out", "lmdeploy").path
    assert config_of(folder)["auto_map"] == {"AutoConfig": "own.Own"}
    assert (folder / "own.py").read_text() == "class Own: ...\n" and not list(folder.glob("configuration_*"))


def test_fields_that_a_checkpoint_leaves_to_its_class_are_filled_in(make_twin, tmp_path):
    left_out = dict.fromkeys(("attention_bias", "sliding_window", "bos_token_id", "rope_scaling"), ...)
    source = make_twin("sdar", **left_out)
    config = config_of(export_for_engine(source, tmp_path / "out", "lmdeploy").path)
    assert LMDEPLOY["SDARForCausalLM"].fields <= config.keys()
    assert (config["attention_bias"], config["sliding_window"], config["rope_scaling"]) == (False, None, None)


@pytest.mark.parametrize("name, engine", SERVED)
def test_null_says_as_little_as_a_field_that_is_not_there(make_twin, models, tmp_path, name, engine):
    def outcome(folder, **fields):
        try:
            return config_of(
                export_for_engine(make_twin(name, folder=folder, **fields), tmp_path / f"{folder}-out", engine).path
            )
        except ValueError as error:
            return str(error).replace(folder, "")

    (architecture,) = config_of(models / name)["architectures"]
    told = {"head_dim", "num_key_value_heads", "norm_topk_prob", "tie_word_embeddings", "mlp_only_layers"}
    for field in told & ENGINES[engine].layouts[architecture].fields:
        assert outcome(f"null-{field}", **{field: None}) == outcome(f"none-{field}", **{field: ...}), field


def test_block_sizes_reach_the_engine(make_twin, tmp_path):
    source = make_twin("sdar", block_size=8)
    assert "--dllm-block-length 8" in export_for_engine(source, tmp_path / "l", "lmdeploy").command
    exported = export_for_engine(source, tmp_path / "s", "sglang")
    assert (exported.path / ALGORITHM_FILE).read_text() == "block_size: 8\n"
    assert f"--dllm-algorithm-config {exported.path}/{ALGORITHM_FILE}" in exported.command


def test_the_published_mask_token_needs_no_note(make_twin, tmp_path):
    def grow(tensors):
        for key in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[key] = torch.zeros(151936, tensors[key].shape[1])

    source = make_twin("sdar", grow, vocab_size=151936, mask_token_id=151669)
    assert export_for_engine(source, tmp_path / "out", "sglang").notes == ()


def test_stacked_experts_are_split(make_twin, models, tmp_path):
    def stack(tensors):
        for layer in (1, 2):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                prefix = f"model.layers.{layer}.mlp.experts"
                parts = [tensors.pop(f"{prefix}.{expert}.{projection}.weight") for expert in range(16)]
                tensors[f"{prefix}.{projection}"] = torch.stack(parts)

    source = make_twin("llada2_moe", stack, model_type="llada2_moe_veomni")
    folder = export_for_engine(source, tmp_path / "out", "sglang").path
    tensors, golden = (load_file(path / "model.safetensors") for path in (folder, models / "llada2_moe"))
    assert tensors.keys() == golden.keys() and all(torch.equal(tensors[key], golden[key]) for key in golden)
    assert config_of(folder)["model_type"] == "llada2_moe"


def test_shards_are_kept_with_their_index(make_twin, tmp_path):
    source = make_twin("sdar")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, of_file in files.items():
        save_file({key: tensors[key] for key in of_file}, source / file, metadata={"format": "pt"})
    weight_map = {key: file for file, of_file in files.items() for key in of_file}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    folder = export_for_engine(source, tmp_path / "out", "sglang").path
    assert json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"] == weight_map
    assert sorted(file.name for file in folder.glob("*.safetensors")) == sorted(files)


UNSERVED = [(name, engine) for name in ("dream", "llada", "llada_moe", "a2d_qwen3", "qwen3") for engine in ENGINES]
UNSERVED += [("llada2_moe", "lmdeploy"), ("llada2_moe", "vllm")]


@pytest.mark.parametrize("name, engine", UNSERVED)
def test_pairs_that_no_engine_serves_are_refused_by_name(models, tmp_path, name, engine):
    family = {"llada2_moe": "llada2", "a2d_qwen3": "qwen3"}.get(name, name)
    match = f"{engine} does not serve the family {family}.*sglang sdar, sdar_moe, llada2; lmdeploy sdar, sdar_moe; vllm"
    with pytest.raises(ValueError, match=match):
        export_for_engine(models / name, tmp_path / "out", engine)
    assert not list(tmp_path.iterdir())


def test_vllm_says_what_it_has(models, tmp_path):
    with pytest.raises(ValueError, match="vllm does not serve the family sdar .*DiffusionGemmaForBlockDiffusion"):
        export_for_engine(models / "sdar", tmp_path / "out", "vllm")


def test_unserved_nemo_checkpoints_are_refused_before_their_weights_are_read(imported, tmp_path):
    checkpoint = imported("dream")
    (checkpoint / "weights").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="lmdeploy does not serve the family dream"):
        export_for_engine(checkpoint, tmp_path / "out", "lmdeploy")


def test_unknown_engines_and_folders(models, tmp_path):
    with pytest.raises(ValueError, match="engine='tgi' is unknown; known: sglang, lmdeploy, vllm"):
        export_for_engine(models / "sdar", tmp_path / "out", "tgi")
    with pytest.raises(FileNotFoundError, match="is no NeMo checkpoint"):
        export_for_engine(tmp_path / "nowhere", tmp_path / "out", "sglang")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export_for_engine(models / "sdar", tmp_path / "out", "sglang")
    export_for_engine(models / "sdar", tmp_path / "out", "sglang", overwrite=True)


def test_what_is_exported_is_not_overwritten(imported, make_twin):
    source = make_twin("sdar", folder="models/source")
    for path in (source, imported(source)):
        for output in (path, path.parent):
            with pytest.raises(ValueError, match=f"cannot be replaced: .*{path.name}, which is read, is in it"):
                export_for_engine(path, output, "sglang", overwrite=True)


@pytest.mark.parametrize(
    "name, engine, fields, match",
    [
        ("sdar", "sglang", {"right_shift_logits": True}, "reads logits at their own position"),
        ("sdar", "sglang", {"ar_loss_weight": 0.1}, "encodes finished"),
        # SGLang looks for experts in every layer; LMDeploy goes by the field.
        ("sdar_moe", "sglang", {"mlp_only_layers": [0]}, r"layers\.0\.mlp\.experts.* is missing"),
        ("llada2_moe", "sglang", {"moe_router_enable_expert_bias": False}, r"=False \(it takes True\)|expert_bias"),
    ],
)
def test_what_an_engine_would_load_wrong_is_refused(make_twin, tmp_path, name, engine, fields, match):
    def densify(tensors):
        if "mlp_only_layers" in fields:
            for key in [key for key in tensors if key.startswith("model.layers.0.mlp.")]:
                del tensors[key]
            shapes = {"gate_proj": (112, 64), "up_proj": (112, 64), "down_proj": (64, 112)}
            tensors |= {f"model.layers.0.mlp.{key}.weight": torch.zeros(shape) for key, shape in shapes.items()}

    source = make_twin(name, densify, **fields)
    with pytest.raises(ValueError, match=match):
        export_for_engine(source, tmp_path / "out", engine)
    assert [path.name for path in tmp_path.iterdir()] == ["twin"]
    if "mlp_only_layers" in fields:
        export_for_engine(source, tmp_path / "lm", "lmdeploy")


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"), r"layers\.1\.self_attn\.q_norm\.weight is missing"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), r"model\.extra is unknown to it"),
        (lambda t: t.update({"model.norm.weight": torch.ones(7)}), r"norm\.weight has the shape \[7\], not \[64\]"),
    ],
)
def test_tensors_are_held_against_the_table(make_twin, tmp_path, change, match):
    with pytest.raises(ValueError, match=f"sglang cannot load this SDARForCausalLM: .*{match}"):
        export_for_engine(make_twin("sdar", change), tmp_path / "out", "sglang")


@pytest.mark.parametrize("engine", ["sglang", "lmdeploy"])
def test_tensors_that_engines_pass_over_stay(make_twin, tmp_path, engine):
    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)

    source = make_twin("sdar", repeat, tie_word_embeddings=True)
    exported = export_for_engine(source, tmp_path / "out", engine).path
    left, right = (load_file(folder / "model.safetensors") for folder in (source, exported))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_every_served_class_belongs_to_a_family():
    known = {c.architecture for family in FAMILIES for c in family.hf_classes}
    assert SGLANG.keys() | LMDEPLOY.keys() <= known
    assert {engine.name: engine.families for engine in ENGINES.values()} == {
        "sglang": ["sdar", "sdar_moe", "llada2"],
        "lmdeploy": ["sdar", "sdar_moe"],
        "vllm": [],
    }
