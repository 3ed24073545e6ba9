"""Tokenizers as transformers 5 saves them: a class that 4 lacks, and a list where 4 has a dict."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from nemo_dllm.connectors.mask_token import MaskToken
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer, write_mask_token


@pytest.fixture(params=[[], ["<|im_start|>"]], ids=["plain", "with special tokens"])
def saved(request, models, tmp_path):
    """A folder without special_tokens_map.json, and the special tokens of its tokenizer."""
    folder = shutil.copytree(models / "qwen3", tmp_path / "saved")
    (folder / "special_tokens_map.json").unlink()
    config = {
        "backend": "tokenizers",
        "eos_token": "<|im_end|>",
        "is_local": True,
        "model_max_length": 512,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "TokenizersBackend",
        **({"extra_special_tokens": request.param} if request.param else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, ["<|im_end|>", "<|endoftext|>", *request.param]


def test_reads_the_same_tokens(saved, models):
    folder, special = saved
    tokenizer = load_hf_tokenizer(folder)
    assert tokenizer.get_vocab() == load_hf_tokenizer(models / "qwen3").get_vocab()
    assert tokenizer.all_special_tokens == special
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (192, 191)


def test_with_a_mask_token_plain_transformers_4_reads_it(saved):
    folder, special = saved
    write_mask_token(folder, MaskToken(196, "<|mask|>", added=True))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.mask_token_id == 196
    assert sorted(tokenizer.all_special_tokens) == sorted([*special, "<|mask|>"])


def test_without_tokenizer_json_it_is_refused_by_name(saved):
    folder, _ = saved
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    with pytest.raises(
        ValueError, match=r"of a class that transformers lacks \(TokenizersBackend\), .* no tokenizer.json"
    ):
        load_hf_tokenizer(folder)
