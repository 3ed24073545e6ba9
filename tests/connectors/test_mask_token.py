import json
import shutil

import pytest
import torch

from nemo_dllm.connectors.companions import copy_companions
from nemo_dllm.connectors.facts import CheckpointFacts, read_facts
from nemo_dllm.connectors.families.qwen3 import QWEN3
from nemo_dllm.connectors.families.registry import find_family
from nemo_dllm.connectors.mask_token import MaskToken, find_mask_token, grown_vocab_size, mask_token_at
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer, write_mask_token

HF = {"vocab_size": 200, "eos_token_id": [192, 191], "bos_token_id": 190}


@pytest.fixture
def tokenizer(models):
    """196 tokens; eos 192, pad 191, no mask token."""
    return load_hf_tokenizer(models / "qwen3")


def test_the_family_s_mask_token_is_the_next_token(tokenizer):
    assert find_mask_token(tokenizer, HF, QWEN3) == MaskToken(196, "<|mask|>", added=True)
    assert grown_vocab_size(HF, QWEN3, MaskToken(196, "<|mask|>", added=True)) == 200


@pytest.mark.parametrize(("rows", "grown"), [(196, 197), (190, 197), (197, 197)])
def test_the_vocabulary_grows_by_what_the_mask_token_needs(tokenizer, rows, grown):
    hf = HF | {"vocab_size": rows}
    assert find_mask_token(tokenizer, hf, QWEN3) == MaskToken(196, "<|mask|>", added=True)
    assert mask_token_at(196, tokenizer, hf, QWEN3).id == 196
    assert grown_vocab_size(hf, QWEN3, MaskToken(196, "<|mask|>")) == grown


def test_ids_with_gaps_give_no_new_id(models, tmp_path):
    twin = shutil.copytree(models / "qwen3", tmp_path / "twin")
    content = json.loads((twin / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["w9"], vocab["w8"] = 400, 196  # 196 tokens, so the next one would be 196.
    (twin / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match="would give '<.mask.>' the id 196, which another token has: its ids have gaps"
    ):
        find_mask_token(load_hf_tokenizer(twin), HF, QWEN3)
    # Whoever chooses an id does what the error asks for.
    assert mask_token_at(199, load_hf_tokenizer(twin), HF, QWEN3) == MaskToken(199, None)


def test_a_text_that_another_token_has_is_not_added_again(tokenizer):
    tokenizer.add_tokens(["<|mask|>"])
    assert mask_token_at(197, tokenizer, HF, QWEN3) == MaskToken(197, None)


def test_the_tokenizer_s_own_mask_token_wins_over_the_family_s(tokenizer):
    tokenizer.add_special_tokens({"mask_token": "w7"})
    assert find_mask_token(tokenizer, HF, QWEN3) == MaskToken(7, "w7")


def test_a_token_with_the_text_of_the_family_s_mask_token_is_the_mask(tokenizer):
    tokenizer.add_tokens(["<|mask|>", "<|later|>"])
    assert find_mask_token(tokenizer, HF, QWEN3) == MaskToken(196, "<|mask|>")


def test_generation_config_comes_after_config_json(tokenizer):
    assert find_mask_token(tokenizer, HF, QWEN3, {"mask_token_id": 8}) == MaskToken(8, "w8")
    assert find_mask_token(tokenizer, HF | {"mask_token_id": 5}, QWEN3, {"mask_token_id": 8}) == MaskToken(5, "w5")


def test_a_file_that_names_a_mask_token_outside_its_vocabulary(tokenizer):
    with pytest.raises(ValueError, match="^config.json has mask_token_id=196, outside the vocabulary of 196; write"):
        find_mask_token(tokenizer, HF | {"vocab_size": 196, "mask_token_id": 196}, QWEN3)


def test_config_json_wins_over_the_tokenizer(tokenizer):
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert find_mask_token(tokenizer, HF | {"mask_token_id": 5}, QWEN3) == MaskToken(5, "w5")


def test_without_a_tokenizer_only_config_json_can_tell():
    assert find_mask_token(None, HF, QWEN3) == MaskToken(None, None)
    assert find_mask_token(None, HF | {"mask_token_id": 7}, QWEN3) == MaskToken(7, None)


def test_a_chosen_id_has_the_text_that_the_tokenizer_has_or_can_get(tokenizer):
    assert mask_token_at(17, tokenizer, HF, QWEN3) == MaskToken(17, "w17")
    assert mask_token_at(196, tokenizer, HF, QWEN3) == MaskToken(196, "<|mask|>", added=True)
    assert mask_token_at(199, tokenizer, HF, QWEN3) == MaskToken(199, None)


@pytest.mark.parametrize("token_id", [-1, 200])
def test_a_chosen_id_must_be_in_the_vocabulary(tokenizer, token_id):
    with pytest.raises(ValueError, match=f"mask_token_id={token_id} is outside the vocabulary of 200"):
        mask_token_at(token_id, tokenizer, HF, QWEN3)


@pytest.mark.parametrize(("token_id", "name"), [(192, "eos"), (191, "eos"), (190, "bos")])
def test_the_mask_is_no_other_special_token(tokenizer, token_id, name):
    with pytest.raises(ValueError, match=f"mask_token_id={token_id} is the {name}_token_id too"):
        mask_token_at(token_id, tokenizer, HF, QWEN3)


def test_facts_of_an_autoregressive_checkpoint(models):
    facts = read_facts(models / "qwen3")
    assert facts == CheckpointFacts(
        family="qwen3",
        source=str(models / "qwen3"),
        revision=None,
        dtype="float32",
        attention="causal",
        right_shift=False,
        block_size=None,
        mask_token_id=196,
        mask_token_added=True,
        special_token_ids={"bos_token_id": 191, "eos_token_id": 192, "pad_token_id": 191},
        other_dtypes={},
        repeats_head=False,
    )
    assert CheckpointFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_facts_that_config_json_states(make_twin):
    twin = make_twin("a2d_qwen3", right_shift_logits=True, mask_token_id=9, block_size=4)
    facts = read_facts(twin)
    assert (facts.attention, facts.right_shift, facts.mask_token_id) == ("bidirectional", True, 9)
    assert facts.block_size == 4


def test_facts_without_tokenizer_and_dtype(make_twin):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].half()

    twin = make_twin("qwen3", halve, torch_dtype=...)
    for file in twin.glob("*token*"):
        file.unlink()
    facts = read_facts(twin)
    assert (facts.mask_token_id, facts.dtype) == (None, "float16")


def test_the_dtype_is_that_of_the_most_weights(make_twin):
    def halve_all_but_norms(tensors):
        for name in tensors:
            tensors[name] = tensors[name] if "norm" in name else tensors[name].bfloat16()

    # Whatever config.json says.
    facts = read_facts(make_twin("qwen3", halve_all_but_norms, torch_dtype="float16"))
    assert facts.dtype == "bfloat16"
    assert set(facts.other_dtypes.values()) == {"float32"}
    assert all("norm" in name for name in facts.other_dtypes)
    assert facts.dtype_of("model.norm.weight") == torch.float32
    assert facts.dtype_of("lm_head.weight") == torch.bfloat16


def test_facts_report_a_mask_token_that_needs_a_new_row(make_twin):
    def cut(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:196].clone()

    facts = read_facts(make_twin("qwen3", cut, vocab_size=196))
    assert (facts.mask_token_id, facts.mask_token_added) == (196, True)


@pytest.mark.parametrize("named", ["196", 196.0, True, [196]])
def test_a_mask_token_id_that_is_no_whole_number(make_twin, named):
    with pytest.raises(ValueError, match=r"mask_token_id=.* is no whole number; write the id of one token"):
        read_facts(make_twin("qwen3", mask_token_id=named))


def test_files_that_name_different_mask_tokens(make_twin, caplog):
    twin = make_twin("sdar", mask_token_id=150)
    (twin / "generation_config.json").write_text(json.dumps({"mask_token_id": 170}))
    with caplog.at_level("WARNING"):
        assert read_facts(twin).mask_token_id == 150
    assert "the mask token is 150, though generation_config.json names 170" in caplog.text
    assert "the mask token is 150, though the tokenizer names 196" in caplog.text


def test_weights_in_a_dtype_that_is_never_trained(make_twin):
    def widen(tensors):
        for name in tensors:
            tensors[name] = tensors[name].double()

    with pytest.raises(ValueError, match=r"twin: its weights are torch.float64; save them in one of torch.float32, "):
        read_facts(make_twin("qwen3", widen))


@pytest.mark.parametrize("removed", [["tokenizer_config.json", "special_tokens_map.json"], ["special_tokens_map.json"]])
def test_a_tokenizer_whose_class_is_that_of_the_model_type_keeps_it(models, tmp_path, removed):
    source = shutil.copytree(models / "qwen3", tmp_path / "twin")
    config = json.loads((source / "tokenizer_config.json").read_text())
    del config["tokenizer_class"]
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    for name in removed:
        (source / name).unlink()
    expected = type(load_hf_tokenizer(source)).__name__
    write_mask_token(source, MaskToken(196, "<|mask|>", added=True))
    hf = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(hf | {"model_type": "a2d-qwen3"}))
    tokenizer = load_hf_tokenizer(source)
    assert (type(tokenizer).__name__, tokenizer.mask_token_id) == (expected, 196)


@pytest.mark.parametrize("without_decoder", [False, True])
def test_files_get_the_mask_token_and_keep_the_rest(models, tmp_path, without_decoder):
    folder = shutil.copytree(models / "qwen3", tmp_path / "twin")
    if without_decoder:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        del config["added_tokens_decoder"]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    before = {file.name: file.read_text() for file in folder.glob("*token*.json")}
    old = load_hf_tokenizer(folder)
    write_mask_token(folder, MaskToken(196, "<|mask|>", added=True))
    new = load_hf_tokenizer(folder)
    assert new.get_vocab() == old.get_vocab() | {"<|mask|>": 196}
    assert new("w3 <|mask|> w5", add_special_tokens=False)["input_ids"] == [3, 196, 5]
    assert (new.mask_token_id, new.eos_token_id, new.pad_token_id) == (196, 192, 191)
    assert new.decode([3, 196, 5], skip_special_tokens=True) == "w3 w5"
    for name, old_text in before.items():
        old_json, new_json = json.loads(old_text), json.loads((folder / name).read_text())
        new_json.pop("mask_token", None)
        if name == "tokenizer.json":
            assert new_json["added_tokens"].pop()["id"] == 196
        if "added_tokens_decoder" in new_json:
            del new_json["added_tokens_decoder"]["196"]
        assert new_json == old_json and list(new_json) == list(old_json)


def test_no_tokenizer_files_no_tokenizer(models, tmp_path):
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    assert load_hf_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "chosen", "named"),
    [
        ("qwen3", 193, True),  # A special token that becomes the mask of a converted model.
        ("qwen3", 17, False),  # Text uses it.
        ("qwen3", 199, False),  # The tokenizer has no such token.
        ("sdar", 196, False),  # As published.
        ("sdar", 193, True),  # Another than the published one.
    ],
)
def test_the_tokenizer_of_another_model_names_its_mask_token(models, tmp_path, name, chosen, named):
    source = models / name
    tokenizer, hf = load_hf_tokenizer(source), json.loads((source / "config.json").read_text())
    mask_token = mask_token_at(chosen, tokenizer, hf, find_family(hf))
    copy_companions(source, tmp_path / "copy", read_facts(source), mask_token)
    copied, tokenizer = load_hf_tokenizer(tmp_path / "copy"), load_hf_tokenizer(source)
    assert copied.mask_token_id == (chosen if named else tokenizer.mask_token_id)
    assert copied.get_vocab() == tokenizer.get_vocab()
    if not named:
        for file in source.glob("*token*"):
            assert (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes()


def test_a_token_that_only_has_the_text_is_named_in_a_converted_model(models, tmp_path):
    source = shutil.copytree(models / "qwen3", tmp_path / "twin")
    content = json.loads((source / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 196, "content": "<|mask|>"})
    (source / "tokenizer.json").write_text(json.dumps(content))
    facts = read_facts(source)
    assert (facts.mask_token_id, facts.mask_token_added) == (196, False)
    copy_companions(source, tmp_path / "copy", facts, MaskToken(196, "<|mask|>"))
    assert load_hf_tokenizer(tmp_path / "copy").mask_token_id == 196
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
