import json
import shutil

import pytest

from nemo_dllm.connectors.facts import CheckpointFacts, read_facts
from nemo_dllm.connectors.mask_token import MaskToken, find_mask_token, load_hf_tokenizer, mask_token_at
from nemo_dllm.connectors.qwen3 import QWEN3

HF = {"vocab_size": 200, "eos_token_id": [192, 191], "bos_token_id": 190}


@pytest.fixture
def tokenizer(models):
    """196 tokens; eos 192, pad 191, no mask token."""
    return load_hf_tokenizer(models / "qwen3")


def test_the_family_s_mask_token_is_the_next_token(tokenizer):
    assert find_mask_token(tokenizer, HF, QWEN3) == MaskToken(196, "<|mask|>")


def test_a_mask_token_that_does_not_fit_the_vocabulary_is_none(tokenizer):
    assert find_mask_token(tokenizer, HF | {"vocab_size": 196}, QWEN3) == MaskToken(None, None)


def test_the_tokenizer_s_own_mask_token_wins_over_the_family_s(tokenizer):
    tokenizer.add_special_tokens({"mask_token": "w7"})
    assert find_mask_token(tokenizer, HF, QWEN3) == MaskToken(7, "w7")


def test_a_token_with_the_text_of_the_family_s_mask_token_is_the_mask(tokenizer):
    tokenizer.add_tokens(["<|mask|>", "<|later|>"])
    assert find_mask_token(tokenizer, HF, QWEN3) == MaskToken(196, "<|mask|>")


def test_config_json_wins_over_the_tokenizer(tokenizer):
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert find_mask_token(tokenizer, HF | {"mask_token_id": 5}, QWEN3) == MaskToken(5, "w5")


def test_without_a_tokenizer_only_config_json_can_tell():
    assert find_mask_token(None, HF, QWEN3) == MaskToken(None, None)
    assert find_mask_token(None, HF | {"mask_token_id": 7}, QWEN3) == MaskToken(7, None)


def test_a_chosen_id_has_the_text_that_the_tokenizer_has_or_can_get(tokenizer):
    assert mask_token_at(17, tokenizer, HF, QWEN3) == MaskToken(17, "w17")
    assert mask_token_at(196, tokenizer, HF, QWEN3) == MaskToken(196, "<|mask|>")
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
        dtype="float32",
        attention="causal",
        right_shift=False,
        block_size=None,
        mask_token_id=196,
    )
    assert CheckpointFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_facts_that_config_json_states(make_twin):
    twin = make_twin("a2d_qwen3", right_shift_logits=True, mask_token_id=9, block_size=4, dtype="bfloat16")
    facts = read_facts(twin)
    assert (facts.attention, facts.right_shift, facts.mask_token_id) == ("bidirectional", True, 9)
    assert (facts.block_size, facts.dtype) == (4, "bfloat16")


def test_facts_without_tokenizer_and_dtype(make_twin):
    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].half()

    twin = make_twin("qwen3", halve, torch_dtype=...)
    for file in twin.glob("*token*"):
        file.unlink()
    facts = read_facts(twin)
    assert (facts.mask_token_id, facts.dtype) == (None, "float16")


def test_no_tokenizer_files_no_tokenizer(models, tmp_path):
    shutil.copy(models / "qwen3" / "config.json", tmp_path)
    assert load_hf_tokenizer(tmp_path) is None
