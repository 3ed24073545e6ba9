"""The modelling code of exports, under transformers 4.57 and, where an interpreter is given, 5.

NEMO_DLLM_TRANSFORMERS5_PYTHON names a Python with torch, safetensors and transformers 5; docs/engines.md has the
commands that make one.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.connectors import modeling
from nemo_dllm.connectors.a2d import a2d_class

BASES = ("Qwen3", "Qwen2", "Llama")
TRANSFORMERS5 = os.environ.get("NEMO_DLLM_TRANSFORMERS5_PYTHON")
TOLERANCE = 2e-5


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((sys.executable, "4.57"), id="4.57"),
        pytest.param(
            (TRANSFORMERS5, "5."),
            id="5",
            marks=pytest.mark.skipif(not TRANSFORMERS5, reason="NEMO_DLLM_TRANSFORMERS5_PYTHON names no interpreter"),
        ),
    ],
)
def loaded(request, models, tmp_path_factory):
    """By base class: the checkpoint's folder, and what another process says of it. Llama 3's frequencies are scaled."""
    python, version = request.param
    root = tmp_path_factory.mktemp("checkpoints")
    folders = {base: with_code(models / f"a2d_{base.lower()}", root / base, base) for base in BASES}
    folders["Llama 3"] = with_code(models / "llama3_rope", root / "llama3", "Llama")
    folders["Qwen3Moe"] = with_code(models / "qwen3_moe", root / "qwen3_moe", "Qwen3Moe")
    return folders, load(python, version, folders.values())


def load(python, version, folders) -> dict:
    script = Path(__file__).with_name("load_with_transformers.py")
    run = subprocess.run([python, script, *folders], capture_output=True, text=True, timeout=300, cwd="/")
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout.splitlines()[-1])
    assert report["version"].startswith(version)
    return report["folders"]


def with_code(source: Path, folder: Path, base: str) -> Path:
    """A checkpoint as an export would write it."""
    shutil.copytree(source, folder)
    shutil.copy(modeling.A2D, folder)
    hf_class = a2d_class(base)
    config = json.loads((folder / "config.json").read_text())
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    config["dtype"] = config.pop("torch_dtype", config.get("dtype"))  # The name that transformers saves.
    config |= {
        "model_type": hf_class.model_type,
        "architectures": [hf_class.architecture],
        "auto_map": dict(hf_class.code.auto_map),
        "mask_token_id": 196,
        "right_shift_logits": False,
        "rope_parameters": {"rope_theta": config["rope_theta"], **scaling},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CHECKPOINTS = pytest.mark.parametrize("name", [*BASES, "Llama 3", "Qwen3Moe"])


@CHECKPOINTS
def test_gives_the_recorded_logits_by_every_way_of_loading(loaded, name):
    folder, facts = loaded[0][name], loaded[1][str(loaded[0][name])]
    assert facts["class"] == a2d_class(name.split()[0]).architecture
    assert len(facts["loaded"]) == 4
    for way, differences in {**facts["loaded"], "saved and loaded again": facts["again"]}.items():
        assert max(differences.values()) < TOLERANCE, (way, differences)
    assert folder.is_dir()


@CHECKPOINTS
def test_attends_in_both_directions_and_does_not_generate(loaded, name):
    facts = loaded[1][str(loaded[0][name])]
    assert not any(facts["causal"])
    assert not facts["generates"]
    assert facts["finite"]


@CHECKPOINTS
def test_arguments_that_callers_pass_along_change_nothing(loaded, name):
    facts = loaded[1][str(loaded[0][name])]
    assert len(facts["arguments"]) == 10 and not any(facts["arguments"].values()), facts["arguments"]
    assert facts["checkpointing"] == 0


@CHECKPOINTS
def test_saving_keeps_every_field_the_code_and_the_keys(loaded, name):
    folder, facts = loaded[0][name], loaded[1][str(loaded[0][name])]
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version")
    assert {field: facts["config"].get(field, "absent") for field in config} == config
    assert facts["files"] == ["config.json", "model.safetensors", "modeling_a2d.py"]
    assert (folder / "saved" / "modeling_a2d.py").read_bytes() == modeling.A2D.read_bytes()
    source = load_file(folder / "model.safetensors")
    assert facts["keys"] == sorted(source)
    assert facts["tied"] == config["tie_word_embeddings"] == ("lm_head.weight" not in source)
    assert len(facts["hidden_states"]) == config["num_hidden_layers"] + 1


def test_every_recorded_case_tells_causal_from_bidirectional(models):
    """Else the differences above would prove nothing."""
    for base in BASES:
        golden = load_file(models / f"a2d_{base.lower()}" / "golden.safetensors")
        assert (golden["logits"] - golden["logits_causal"]).abs().max() > 100 * TOLERANCE


@pytest.fixture(scope="module")
def attention_bias():
    from nemo_dllm.connectors.modeling.modeling_a2d import attention_bias

    return attention_bias


class TestAttentionBias:
    def test_padding(self, attention_bias):
        bias = attention_bias(torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.float16)
        hidden = -torch.inf
        assert bias.dtype == torch.float16
        assert bias.tolist() == [[[[0, 0, hidden]]], [[[0, 0, 0]]]]

    def test_explicit(self, attention_bias):
        visible = torch.tensor([[[[True, False], [False, False]]]])
        assert attention_bias(visible, torch.float32).tolist() == [[[[0, -torch.inf], [0, 0]]]]

    def test_nothing_to_hide_is_no_bias(self, attention_bias):
        assert attention_bias(None, torch.float32) is None

    @pytest.mark.parametrize("mask", [torch.ones(1, 1, 2, 2), torch.ones(1, 2, 2, dtype=torch.bool)])
    def test_refuses_what_could_be_read_either_way(self, attention_bias, mask):
        with pytest.raises(ValueError, match=f"attention_mask has {mask.dim()} dimensions and dtype {mask.dtype}"):
            attention_bias(mask, torch.float32)


def test_refuses_two_inputs_and_what_it_does_not_do():
    from nemo_dllm.connectors.modeling.modeling_a2d import A2DLlamaConfig, A2DLlamaLMHeadModel

    config = A2DLlamaConfig(
        hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=5
    )
    model, ids = A2DLlamaLMHeadModel(config), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError, match="give either input_ids or inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(1, 2, 8))
    # Silence would be a loss, or a cache, of another model.
    for argument in ({"labels": ids}, {"past_key_values": ()}, {"output_attentions": True}):
        with pytest.raises(TypeError, match=f"{next(iter(argument))} must be None"):
            model(ids, **argument)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    assert torch.equal(embedded, model(ids).logits)
    with pytest.raises(ValueError, match="does not support an attention implementation through torch's flex_attention"):
        A2DLlamaLMHeadModel._from_config(config, attn_implementation="flex_attention")
