"""A conversion compared with its source, and what a changed weight, attention or file makes of it."""

import pytest
import torch

from nemo_dllm.collections.diffusion.attention.masks import BlockCausal

pytestmark = pytest.mark.nemo

NORM = "model.layers.1.self_attn.k_norm.weight"


@pytest.fixture
def verify(single_process):
    from nemo_dllm.connectors.verify import verify_checkpoint

    return verify_checkpoint


@pytest.fixture
def imported(single_process, models, tmp_path):
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config
    from nemo_dllm.connectors.hf_import import import_hf_checkpoint

    def run(source):
        right_shift = source.name == "dream"
        model = MDLMModel(hf_to_nemo_config(source), MaskedDiffusion(right_shift=right_shift))
        return import_hf_checkpoint(model, source, tmp_path / "nemo")

    return run


@pytest.mark.parametrize(("name", "blocks"), [("sdar", 4), ("sdar_moe", 4), ("llada2_moe", 32)])
def test_block_causal_models_whose_configuration_names_no_blocks(verify, make_twin, monkeypatch, name, blocks):
    from nemo_dllm.connectors import verify as module

    sizes = []
    monkeypatch.setattr(module, "BlockCausal", lambda size: sizes.append(size) or BlockCausal(size))
    twin = make_twin(name, block_size=...)
    found = verify(twin, twin)
    assert found.passed and found.attention == "block_causal"
    assert sizes == [blocks, blocks]


def test_rounding_to_the_coarser_dtype_is_no_difference(verify, imported, models, make_twin):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()

    half = make_twin("qwen3", halve, torch_dtype="bfloat16")
    for left, right in ((half, imported(models / "qwen3")), (models / "qwen3", half)):
        found = verify(left, right)
        assert found.passed and found.dtype is torch.bfloat16
        assert max(difference.max_error for difference in found.weights) == 0
        assert max(difference.max_error for difference in found.logits) < 2e-5


@pytest.mark.parametrize(
    "name, attention, reference",
    [
        ("qwen3", "causal", "transformers Qwen3ForCausalLM"),
        ("llama", "causal", "transformers LlamaForCausalLM"),
        ("qwen2", "causal", "transformers Qwen2ForCausalLM"),
        ("qwen3_moe", "causal", "transformers Qwen3MoeForCausalLM"),
        ("dream", "bidirectional", "this package's forward of the folder"),
    ],
)
def test_an_import_is_its_source(verify, imported, models, name, attention, reference):
    found = verify(models / name, imported(models / name))
    assert found.passed
    assert (found.attention, found.reference) == (attention, reference)
    assert max(difference.max_error for difference in found.weights) == 0
    assert max(difference.max_error for difference in found.logits) < 2e-5
    assert len(found.logits) == 4 and min(difference.cosine for difference in found.logits) > 1 - 1e-6


def test_a_changed_weight_is_named_and_changes_the_logits(verify, models, make_twin):
    def change(tensors):
        tensors[NORM] = tensors[NORM].flip(0)

    found = verify(models / "qwen3", make_twin("qwen3", change))
    assert not found.passed
    assert [difference.name for difference in found.weights if difference.max_error] == [NORM]
    # The toy tokenizer knows no word of the prompts: one token repeated leaves attention nothing to choose.
    assert found.logits[-1].max_error > 1e-2


def test_a_change_of_the_config_changes_the_logits_alone(verify, models, make_twin):
    found = verify(models / "qwen3", make_twin("qwen3", rope_theta=10000))
    assert not found.passed
    assert max(difference.max_error for difference in found.weights) == 0


def test_the_tolerance_decides(verify, models, make_twin):
    def change(tensors):
        tensors[NORM] += 1e-4

    twin = make_twin("qwen3", change)
    assert verify(models / "qwen3", twin, tolerance=1e-2).passed
    assert not verify(models / "qwen3", twin, tolerance=1e-5).passed


def test_comparison_of_tensors():
    from nemo_dllm.connectors.verify import difference

    ones = torch.ones(4)
    assert difference("a", ones, ones) == ("a", 0.0, pytest.approx(1.0))
    assert difference("a", ones, -2 * ones) == ("a", 3.0, pytest.approx(-1.0))
    assert difference("a", ones + 1e-3, ones.bfloat16()).max_error == 0
    assert difference("a", ones + 1e-2, ones.bfloat16()).max_error > 0
    assert difference("a", ones, torch.ones(3)).max_error == float("inf")
    assert difference("a", 0 * ones, 0 * ones) == ("a", 0.0, 1.0)  # Biases that training never moved.
    assert difference("a", 0 * ones, ones).cosine == 0


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen3", {"architectures": ...}),
        ("qwen3", {"architectures": None}),
        ("qwen3", {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
        ("llama", {"rope_theta": ..., "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rope_scaling": {}}),
        ("qwen3_moe", {"num_experts": ..., "num_local_experts": 8}),
    ],
)
def test_configurations_as_other_versions_of_transformers_save_them(verify, make_twin, name, config):
    twin = make_twin(name, **config)
    found = verify(twin, twin)
    assert found.passed and found.reference.startswith("transformers "), found


def test_the_command_prints_one_table_and_fails_loudly(models, make_twin, single_process, capsys):
    from nemo_dllm.recipes.verification import verify_and_print

    def change(tensors):
        tensors[NORM] += 1.0

    verify_and_print(models / "qwen3_tied", models / "qwen3_tied", 1e-3)
    assert "passed" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        verify_and_print(models / "qwen3", make_twin("qwen3", change), 1e-3)
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "more than the tolerance of 0.001" in printed
    assert printed.count("logits, prompt") == 4 and "reference: transformers Qwen3ForCausalLM" in printed


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"mask_token_id": 150}, "mask_token_id=196 in the Hugging Face checkpoint, 150 in the other"),
        ({"block_size": 8}, "block_size=4 in the Hugging Face checkpoint, 8 in the other"),
        ({"right_shift_logits": True}, "right_shift=False in the Hugging Face checkpoint, True in the other"),
    ],
)
def test_another_mask_token_block_or_shift_is_another_model(verify, models, make_twin, capsys, changed, expected):
    from nemo_dllm.recipes.verification import verify_and_print

    twin = make_twin("sdar", **changed)
    found = verify(models / "sdar", twin)
    assert max(difference.max_error for difference in found.weights) == 0
    assert found.facts == [expected] and not found.passed
    with pytest.raises(SystemExit, match="1"):
        verify_and_print(models / "sdar", twin, 1e-3)
    assert expected in " ".join(capsys.readouterr().out.split())


def test_the_mask_token_of_an_import(verify, models, make_twin, tmp_path):
    from nemo_dllm.connectors.conversion import import_checkpoint

    # The source names none, so any will do; a source that names one has that.
    assert verify(models / "qwen3", import_checkpoint(models / "qwen3", tmp_path / "1", mask_token_id=17)).passed
    named = make_twin("qwen3", mask_token_id=17)
    assert verify(named, import_checkpoint(named, tmp_path / "2")).passed
    other = import_checkpoint(named, tmp_path / "3", mask_token_id=18)
    assert verify(named, other).facts == ["mask_token_id=17 in the Hugging Face checkpoint, 18 in the other"]


@pytest.mark.parametrize(("left", "right"), [("qwen3_moe", "qwen3"), ("qwen3", "llada"), ("sdar", "qwen3")])
def test_another_family_is_refused_by_name(verify, models, left, right):
    with pytest.raises(ValueError, match=f"{left} is of family {left}, .* of family {right}: two models"):
        verify(models / left, models / right)
