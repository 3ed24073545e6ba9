"""A checkpoint whose only tokenizer is a file of sentencepiece, as those of LLaMA 1 and 2."""

import json

import pytest

pytestmark = pytest.mark.nemo


@pytest.fixture
def source(make_twin, tmp_path):
    import sentencepiece

    text = tmp_path / "text"
    text.write_text("\n".join(f"the quick brown fox jumps over {number} lazy dogs" for number in range(300)))
    twin = make_twin("llama", bos_token_id=1, eos_token_id=2, pad_token_id=None)
    for file in twin.glob("*token*"):
        file.unlink()
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(twin / "tokenizer"), vocab_size=120, model_type="bpe", hard_vocab_limit=False
    )
    (twin / "tokenizer.vocab").unlink()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
    (twin / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **special}))
    return twin


def test_it_gets_a_mask_token_and_keeps_its_file(single_process, source, tmp_path):
    from nemo_dllm.connectors.conversion import import_checkpoint
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint
    from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer

    assert load_hf_tokenizer(source)("the quick fox")["input_ids"][0] == 1
    exported = export_hf_checkpoint(import_checkpoint(source, tmp_path / "nemo"), tmp_path / "hf")
    config, tokenizer = json.loads((exported / "config.json").read_text()), load_hf_tokenizer(exported)
    assert config["mask_token_id"] == tokenizer.mask_token_id == len(load_hf_tokenizer(source))
    assert tokenizer.mask_token_id in tokenizer("the quick <|mask|> fox")["input_ids"]
    assert (exported / "tokenizer.model").read_bytes() == (source / "tokenizer.model").read_bytes()
