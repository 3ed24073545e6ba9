"""Checkpoints trained with kernels that this machine lacks."""

import pytest
import torch

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA has the kernels"),
]
MODELS, LAYERS = "nemo_dllm.collections.diffusion.models.model", "nemo_dllm.collections.diffusion.attention.layers"


@pytest.fixture
def trained_with_flex(single_process, models, tmp_path, monkeypatch):
    """The import of a checkpoint as a machine with CUDA writes it, for a model with FlexAttention."""
    from nemo_dllm.connectors.conversion import diffusion_model
    from nemo_dllm.connectors.hf_import import import_hf_checkpoint

    source = models / "a2d_qwen3"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(f"{MODELS}.check_layer_choice", lambda *choices: None)
        elsewhere.setattr(f"{LAYERS}.check_layer_choice", lambda *choices: None)
        plain = diffusion_model(source)
        model = type(plain)(plain.config, plain.objective, attention_backend="flex")
        elsewhere.setattr("nemo_dllm.connectors.hf_import.adopt_import", lambda *arguments: None)
        return import_hf_checkpoint(model, source, tmp_path / "nemo")


def test_flex_attention_becomes_sdpa_without_cuda(trained_with_flex, models, logit_errors, caplog, tmp_path):
    from nemo.lightning import io
    from safetensors.torch import load_file

    from nemo_dllm.connectors.adoption import adopt_import
    from nemo_dllm.connectors.conversion import diffusion_model
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint, load_nemo_checkpoint
    from nemo_dllm.connectors.verify import verify_checkpoint

    with pytest.raises(ValueError, match="attention_backend='flex' needs a CUDA device"):
        io.load_context(trained_with_flex, subpath="model")
    with caplog.at_level("WARNING"):
        model = load_nemo_checkpoint(trained_with_flex)
    said = [record.message for record in caplog.records if "attention_backend" in record.message]
    assert said == [
        f"{trained_with_flex} has attention_backend='flex', which needs a CUDA device; 'sdpa' is taken here"
    ]
    assert model.attention_backend == "sdpa"
    errors = logit_errors(model.module.eval(), load_file(models / "a2d_qwen3" / "golden.safetensors"))
    assert errors and max(errors.values()) < 2e-5
    assert verify_checkpoint(models / "a2d_qwen3", trained_with_flex).passed
    exported = export_hf_checkpoint(trained_with_flex, tmp_path / "hf")
    assert verify_checkpoint(models / "a2d_qwen3", exported).passed
    started = diffusion_model(models / "a2d_qwen3")
    adopt_import(started, trained_with_flex)
    assert started.objective.mask_token_id == 196


def test_every_choice_of_kernels_is_replaced_by_one_that_any_machine_has():
    from nemo_dllm.collections.diffusion.attention.layers import check_layer_choice
    from nemo_dllm.connectors.model_context import _WITHOUT

    for (field, _), (_, instead) in _WITHOUT.items():
        check_layer_choice(**{"transformer_impl": "auto", "attention_backend": "auto", field: instead})


@pytest.mark.parametrize("error", [MemoryError(), PermissionError(13, "Permission denied", "weights")], ids=repr)
def test_what_is_no_damage_is_not_called_so(tmp_path, error):
    from nemo_dllm.connectors.model_context import damage_named

    with pytest.raises(type(error)) as raised, damage_named(tmp_path):
        raise error
    assert raised.value is error


def test_too_little_memory_is_told(tmp_path):
    from nemo_dllm.connectors.model_context import damage_named

    said = f"{tmp_path} needs more memory than this machine has free"
    with pytest.raises(ValueError, match=said), damage_named(tmp_path):
        torch.empty(1 << 60, dtype=torch.uint8)
