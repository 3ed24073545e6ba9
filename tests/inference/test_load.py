from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.nemo


@pytest.fixture(scope="module")
def load_checkpoint(single_process):
    from nemo_dllm.collections.diffusion.inference import load_checkpoint

    return load_checkpoint


@pytest.fixture(scope="module")
def golden(hf_folder, model):
    return {name: tensor.to(model.device) for name, tensor in load_file(hf_folder / "golden.safetensors").items()}


def test_the_denoiser_gives_the_recorded_logits(model, golden):
    tolerance = 1e-4 if model.device.type == "cuda" else 2e-5
    logits = model.denoiser(golden["input_ids"])
    torch.testing.assert_close(logits, golden["logits"], rtol=0, atol=tolerance)
    real = golden["padded_attention_mask"].bool()
    padded = model.denoiser(golden["padded_input_ids"], key_mask_BT=real)
    torch.testing.assert_close(padded[real], golden["padded_logits"][real], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["dream", "llada", "llada2_moe", "sdar"])
def test_the_context_is_known_without_the_weights(load_checkpoint, name):
    from nemo_dllm.collections.diffusion.inference.load import context_length

    folder = Path(__file__).parents[1] / "golden" / "models" / name
    assert context_length(folder) == load_checkpoint(folder).seq_length


def test_the_denoiser_is_for_inference(model, golden):
    assert not model.denoiser(golden["input_ids"]).requires_grad
    assert not model.core.training


def test_a_nemo_checkpoint_is_the_same_model(load_checkpoint, model, nemo_folder, golden):
    imported = load_checkpoint(nemo_folder)
    assert torch.equal(imported.denoiser(golden["input_ids"]), model.denoiser(golden["input_ids"]))
    assert (imported.mask_token_id, imported.right_shift) == (model.mask_token_id, model.right_shift) == (196, False)
    assert imported.encode("w5 w7") == model.encode("w5 w7")


def test_the_shift_is_the_checkpoints(load_checkpoint, hf_twin):
    shifted = load_checkpoint(hf_twin(right_shift_logits=True))
    assert shifted.sampler_config().right_shift
    # With a shift the first token has no left neighbour, so that an empty prompt needs a start token.
    with_start = SimpleNamespace(bos_id=191, eos_id=192, vocab_size=196)
    shifted = replace(shifted, tokenizer=with_start)
    assert shifted.sampler_config().bos_token_id == 191
    plain = replace(shifted, objective=replace(shifted.objective, right_shift=False))
    assert plain.sampler_config().bos_token_id is None


def test_text_and_tokens(model):
    assert model.encode("w5 w7") == [5, 7]
    assert model.decode([5, 192, 7]) == "w5 w7"
    assert model.seq_length == 512


def test_what_the_checkpoint_decides_about_sampling(model):
    config = model.sampler_config(max_new_tokens=3)
    assert (config.max_new_tokens, config.eos_token_id, config.right_shift) == (3, 192, False)
    # 196 is the mask token, which samplers never choose; beyond it no id has a text.
    assert config.suppress_token_ids == (197, 198, 199)


def test_a_preset_gives_way_to_the_checkpoint_and_settings_to_neither(model):
    config = model.sampler_config("dream", top_p=0.5)
    assert (config.remasking, config.right_shift, config.top_p) == ("entropy", False, 0.5)
    with pytest.raises(ValueError, match="preset='drem' is unknown; known: .*dream"):
        model.sampler_config("drem")


def test_without_a_tokenizer_there_are_only_ids(load_checkpoint, hf_twin):
    folder = hf_twin(without=("tokenizer*", "special_tokens*"), mask_token_id=150)
    loaded = load_checkpoint(folder)
    assert loaded.mask_token_id == 150
    assert loaded.sampler_config().suppress_token_ids == ()
    with pytest.raises(ValueError, match="the checkpoint has no tokenizer"):
        loaded.encode("w5")


def test_half_precision_is_kept_where_it_is_fast(load_checkpoint, hf_twin, golden):
    folder = hf_twin(dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    loaded = load_checkpoint(folder)
    logits = loaded.denoiser(golden["input_ids"])
    assert logits.dtype == (torch.bfloat16 if loaded.device.type == "cuda" else torch.float32)
    assert (logits.float() - golden["logits"]).abs().mean() < 2e-2 * golden["logits"].std()


GOLDEN = Path(__file__).parents[1] / "golden" / "models"


@pytest.mark.parametrize(
    "name, block_size, preset, fields",
    [
        ("sdar", 4, "sdar", {"cache": "exact", "block_size": 4, "threshold": 0.85, "block_origin": "sequence"}),
        ("sdar_moe", 4, "sdar", {"cache": "exact", "block_size": 4}),
        ("llada2_moe", 32, "llada2", {"cache": "exact", "block_size": 32, "threshold": 0.95}),
        ("dream", None, "dream", {"cache": None, "right_shift": True, "remasking": "entropy"}),
        ("llada", None, "llada", {"cache": None, "block_size": 32, "threshold": None}),
        ("a2d_llama", None, None, {"cache": None, "block_size": None}),
    ],
)
def test_the_checkpoint_chooses_pattern_and_preset(load_checkpoint, name, block_size, preset, fields):
    loaded = load_checkpoint(GOLDEN / name)
    assert (loaded.block_size, loaded.default_preset) == (block_size, preset)
    assert loaded.denoiser.block_size == block_size
    config = loaded.sampler_config()
    assert {field: getattr(config, field) for field in fields} == fields
    tokens_BT = torch.arange(1, 41, device=loaded.device)[None]
    changed_BT = tokens_BT.clone()
    changed_BT[0, -1] = 99
    differs_T = ((loaded.denoiser(tokens_BT) - loaded.denoiser(changed_BT)).abs() > 1e-4).any(-1)[0]
    # Only from the block of the changed token on, where there are blocks.
    assert differs_T.nonzero()[0].item() == (39 // block_size * block_size if block_size else 0)


def test_a_block_size_makes_an_exported_model_block_causal(load_checkpoint, hf_twin):
    loaded = load_checkpoint(hf_twin(block_size=8))
    config = loaded.sampler_config()
    assert (loaded.block_size, loaded.default_preset) == (8, None)
    assert (config.cache, config.block_size, config.block_origin) == ("exact", 8, "sequence")
    assert loaded.sampler_config(cache=None).block_origin == "sequence"


def test_caches_are_for_the_models_that_they_fit(load_checkpoint, model):
    with pytest.raises(ValueError, match="cache='exact' is for block-causal models, and this one attends in both"):
        model.sampler_config("sdar")
    with pytest.raises(ValueError, match="cache='approximate_dual' is for bidirectional models.*take 'exact'"):
        load_checkpoint(GOLDEN / "sdar").sampler_config(cache="approximate_dual")
    assert model.sampler_config("fast_dllm").cache == "approximate_dual"


@pytest.mark.parametrize("changes, causal", [({}, False), ({"ar_loss_weight": 0.5}, True)])
def test_a_nemo_checkpoint_of_block_diffusion(load_checkpoint, tmp_path, changes, causal):
    from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
    from nemo_dllm.collections.diffusion.objectives import BlockDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config
    from nemo_dllm.connectors.hf_import import import_hf_checkpoint

    objective = BlockDiffusion(block_size=8, **changes)
    folder = import_hf_checkpoint(
        BD3LMModel(hf_to_nemo_config(GOLDEN / "sdar"), objective), GOLDEN / "sdar", tmp_path / "nemo"
    )
    loaded = load_checkpoint(folder)
    assert (loaded.family, loaded.block_size, loaded.denoiser.causal_commits) == ("sdar", 8, causal)
    assert loaded.sampler_config().block_size == 8


def test_no_diffusion_model_no_sampling(load_checkpoint, hf_twin, autoregressive_folder):
    with pytest.raises(ValueError, match=r"qwen3 is an autoregressive model.*nemo-dllm finetune --factory.*init_from="):
        load_checkpoint(autoregressive_folder)
    folder = hf_twin(vocab_size=196)
    tensors = load_file(folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    save_file(tensors | {name: tensors[name][:196].clone()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="has no mask token; set mask_token_id in its config.json"):
        load_checkpoint(folder)
