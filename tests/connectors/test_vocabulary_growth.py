"""Tables that are longer than the file's: closed forms of the new rows, and an import that needs them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.vocabulary_growth import GrownCheckpoint

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GROWN = 203


def rows_to(count):
    def cut(tensors):
        for name in (EMBEDDING, HEAD):
            if name in tensors:
                tensors[name] = tensors[name][:count].clone()

    return cut


@pytest.fixture
def grown(models):
    def make(mask_init):
        checkpoint = HFCheckpoint(models / "qwen3")
        return GrownCheckpoint(checkpoint, checkpoint.config, [EMBEDDING, HEAD], GROWN, mask_init)

    return make


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_new_rows(grown, models, name):
    table = load_file(models / "qwen3" / "model.safetensors")[name].double()
    mean, std = table.mean(0), table.std(correction=0)
    rows = {mask_init: grown(mask_init).tensor(name)[200:].double() for mask_init in ("mean", "random", "zero")}
    assert not rows["zero"].any()
    assert rows["random"].std() == pytest.approx(std.item(), rel=0.15)
    noise = (rows["mean"] - mean) / std
    assert noise.std() == pytest.approx(0.02, rel=0.15)
    assert torch.equal(grown("mean").tensor(name)[:200], table.float())
    assert (rows["mean"][0] != rows["mean"][1]).all()


def test_tables_have_noise_of_their_own(grown):
    rows = grown("random")
    assert not torch.equal(rows.tensor(EMBEDDING)[200:], rows.tensor(HEAD)[200:])


@pytest.mark.parametrize("columns", [slice(None), slice(8, 24)])
@pytest.mark.parametrize(
    "rows", [slice(0, 100), slice(150, 201), slice(150, 203), slice(200, 202), slice(201, 203), slice(203, 203)]
)
def test_any_part_is_that_of_the_whole(grown, rows, columns):
    whole = grown("mean").tensor(EMBEDDING)
    assert whole.shape == (GROWN, 64)
    assert torch.equal(grown("mean").tensor(EMBEDDING, rows, columns), whole[rows, columns])


def test_other_tensors_are_the_file_s(grown, models):
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(
        grown("mean").tensor(name, columns=slice(0, 9)), HFCheckpoint(models / "qwen3").tensor(name)[:, :9]
    )
    assert grown("mean").shapes[name] == HFCheckpoint(models / "qwen3").shapes[name]


def test_an_unknown_init_is_refused(grown):
    with pytest.raises(ValueError, match="mask_init='means' is unknown; choose from mean, random, zero"):
        grown("means")


@pytest.fixture
def convert(single_process, tmp_path):
    """Imports a folder for an autoregressive start, and exports the import."""
    from nemo.collections import llm

    import nemo_dllm.connectors.importers  # noqa: F401
    from nemo_dllm.collections.diffusion.models.a2d import A2DModel
    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
    from nemo_dllm.connectors.config import hf_to_nemo_config

    def convert(source, kind=A2DModel, name="converted", mask_token_id=None, **options):
        model = kind(hf_to_nemo_config(source), MaskedDiffusion(mask_token_id=mask_token_id))
        imported = llm.import_ckpt(model, f"hf://{source}", output_path=tmp_path / f"{name}_nemo", **options)
        return model, llm.export_ckpt(imported, "hf", output_path=tmp_path / name)

    convert.again = lambda source: convert(source, MDLMModel, "again")
    return convert


@pytest.mark.nemo
@pytest.mark.parametrize("name, rows", [("qwen3", 196), ("qwen3_tied", 196), ("llama", 190)])
def test_an_import_grows_the_tables_and_nothing_else(convert, make_twin, name, rows):
    """Below 196 rows there are tokens without one, too."""
    from transformers import AutoTokenizer

    twin = make_twin(name, rows_to(rows), vocab_size=rows)
    model, exported = convert(twin)
    assert (model.config.vocab_size, model.__io__.config.vocab_size, model.objective.mask_token_id) == (197, 197, 196)
    before, after = (load_file(folder / "model.safetensors") for folder in (twin, exported))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if tensor.shape[0] != rows:
            assert torch.equal(after[key], tensor)
            continue
        assert torch.equal(after[key][:rows], tensor)
        assert after[key].shape == (197, 64)
        assert (after[key][rows:] - tensor.mean(0)).abs().max() < 0.1 * tensor.std()
    config = json.loads((exported / "config.json").read_text())
    assert (config["vocab_size"], config["mask_token_id"]) == (197, 196)
    assert AutoTokenizer.from_pretrained(exported).mask_token_id == 196
    summary = json.loads((exported.parent / "converted_nemo" / "nemo_dllm_conversion.json").read_text())
    assert summary["added"] == {"mask_token": True, "vocabulary_rows": 197 - rows, "mask_init": "mean"}
    _, again = convert.again(exported)
    repeated = load_file(again / "model.safetensors")
    assert all(torch.equal(repeated[key], after[key]) for key in after)
    assert json.loads((again / "config.json").read_text()) == config


@pytest.mark.nemo
def test_the_rows_are_made_as_asked(convert, make_twin):
    twin = make_twin("qwen3", rows_to(196), vocab_size=196)
    _, exported = convert(twin, mask_init="zero")
    assert not load_file(exported / "model.safetensors")[EMBEDDING][196].any()


@pytest.mark.nemo
def test_ids_that_no_token_has_are_refused_beyond_the_table(convert, make_twin, tmp_path):
    twin = make_twin("qwen3", rows_to(196), vocab_size=196)
    text = "mask_token_id=197 is outside the vocabulary of 196; choose an id from 0 to 195, or leave it out"
    with pytest.raises(ValueError, match=text):
        convert(twin, mask_token_id=197)
    assert [folder.name for folder in tmp_path.iterdir()] == ["twin"]
