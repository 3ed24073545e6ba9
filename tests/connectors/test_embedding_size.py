"""LLaDA's ``vocab_size`` may count the tokenizer's tokens only; its tables have ``embedding_size`` rows."""

import json

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.nemo

# The tables of the golden checkpoint have 200 rows.
SIZES = {"vocab_size": 190, "embedding_size": 200}


@pytest.mark.parametrize("mask_token_id", [None, 196, 199])
def test_the_mask_token_may_be_any_row(single_process, make_twin, tmp_path, mask_token_id):
    from nemo_dllm.connectors.conversion import import_checkpoint
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    source = make_twin("llada", **SIZES, mask_token_id=... if mask_token_id is None else mask_token_id)
    exported = export_hf_checkpoint(import_checkpoint(source, tmp_path / "nemo"), tmp_path / "hf")
    config, summary = (
        json.loads((exported / name).read_text()) for name in ("config.json", "nemo_dllm_conversion.json")
    )
    assert {name: config[name] for name in SIZES} == SIZES
    assert summary["vocab_size"] == 200
    assert json.loads((tmp_path / "nemo" / "nemo_dllm_conversion.json").read_text())["added"]["vocabulary_rows"] == 0
    left, right = (load_file(folder / "model.safetensors") for folder in (source, exported))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_mask_token_behind_the_rows(single_process, make_twin, tmp_path):
    from nemo_dllm.connectors.conversion import import_checkpoint

    source = make_twin("llada", **SIZES, mask_token_id=200)
    with pytest.raises(ValueError, match="mask_token_id=200.* outside the vocabulary of 200"):
        import_checkpoint(source, tmp_path / "nemo")


def test_the_checkpoint_samples(single_process, make_twin):
    from nemo_dllm.collections.diffusion.inference.load import load_checkpoint

    assert load_checkpoint(make_twin("llada", **SIZES, mask_token_id=199)).mask_token_id == 199


def test_a_head_that_is_not_tied_names_the_family_s_field(load, make_twin):
    with pytest.raises(ValueError, match="ff_out.weight differs from .*wte.weight; set weight_tying to false there"):
        load(make_twin("llada", weight_tying=True))
