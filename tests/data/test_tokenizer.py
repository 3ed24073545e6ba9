import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nemo_dllm.collections.diffusion.data.packed import encode_documents
from nemo_dllm.collections.diffusion.data.tokenizer import (
    EOS_TOKEN,
    MASK_TOKEN,
    byte_tokenizer,
    cached_byte_bpe,
    train_byte_bpe,
    vocabulary_size,
)

TEXTS = ["the cat sat on the mat , then the cat left", "the dog <|mask|> and the fog <|endoftext|> don't"] * 4
ODD_TEXTS = [
    "",
    " ",
    "  two  spaces , a comma ! don 't",
    "line\nline\r\n\ttab\x00\x7f",
    "naïve e\u0301 vs é, ﬁ, Å vs A\u030a",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 \u200b\u2028\ufeff\ufffd",
    "中文 عربى עברית हिन्दी",
    "\U0010ffff\u0085\u00a0",
    f"{MASK_TOKEN}{EOS_TOKEN} <|mask|",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "bpe": train_byte_bpe(TEXTS, 290, folder / "bpe"),
        "byte": byte_tokenizer(folder / "byte", additional_special_tokens=["<|user|>"]),
    }


@pytest.mark.parametrize(
    ("name", "ids"),
    [("bpe", {EOS_TOKEN: 288, MASK_TOKEN: 289}), ("byte", {"<|user|>": 256, EOS_TOKEN: 257, MASK_TOKEN: 258})],
)
def test_folder_loads_with_its_special_tokens(folders, name, ids):
    assert {path.name for path in folders[name].iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    }
    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert len(tokenizer) == max(ids.values()) + 1
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        ids[MASK_TOKEN],
        ids[EOS_TOKEN],
        ids[EOS_TOKEN],
    )
    for token, token_id in ids.items():
        assert tokenizer(token)["input_ids"] == [token_id]


@pytest.mark.parametrize("name", ["bpe", "byte"])
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_survives_and_special_strings_stay_text(folders, name, text):
    tokenizer = AutoTokenizer.from_pretrained(folders[name])
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_byte_ids_are_the_bytes(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["byte"])
    assert tokenizer("a é😀\n")["input_ids"] == list("a é😀\n".encode())
    every_byte = tokenizer.convert_ids_to_tokens(range(256))
    assert len(set(every_byte)) == 256
    # 0xC3 0x28 is not UTF-8, so only ids can show that all 256 bytes have their place.
    assert tokenizer.decode([0xC3, 0x28]) == "\ufffd("


def test_training_learns_merges_and_is_deterministic(folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders["bpe"])
    assert tokenizer.tokenize(" the") == ["Ġthe"]
    again = train_byte_bpe(iter(TEXTS), 290, tmp_path / "again")
    for file in folders["bpe"].iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


def test_cache_is_keyed_by_text_and_size(tmp_path):
    first = cached_byte_bpe(TEXTS, 270, tmp_path)
    assert cached_byte_bpe(TEXTS, 270, tmp_path) == first
    others = [
        cached_byte_bpe(TEXTS, 271, tmp_path),
        cached_byte_bpe(TEXTS[1:], 270, tmp_path),
        cached_byte_bpe(TEXTS[::-1], 270, tmp_path),
    ]
    assert len({first, *others}) == 4
    assert len(AutoTokenizer.from_pretrained(first)) == 270


def test_errors(folders, tmp_path):
    with pytest.raises(ValueError, match="vocab_size=257 is too small for 256 bytes and 2 special tokens; .*258"):
        train_byte_bpe(TEXTS, 257, tmp_path / "small")
    assert len(AutoTokenizer.from_pretrained(train_byte_bpe(TEXTS, 258, tmp_path / "bytes_only"))) == 258
    with pytest.raises(FileExistsError, match=r"folder='.*bpe' exists"):
        train_byte_bpe(TEXTS, 300, folders["bpe"])


def test_size_of_a_vocabulary_with_holes():
    """Ids need not be neighbours; the highest decides which integers hold them."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 70_000, "</s>": 3}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert (len(tokenizer), vocabulary_size(tokenizer)) == (3, 70_001)
    assert encode_documents(["b"], tokenizer).tokens.tolist() == [70_000, 3]
