"""Texts of tokens: what is left out, bytes that make no character, and the time it takes."""

import json
import random
import time
from pathlib import Path

import pytest
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast

from nemo_dllm.collections.diffusion.data.mock_datamodule import MockTokenizer
from nemo_dllm.collections.diffusion.inference.text_decoder import TextDecoder
from nemo_dllm.collections.diffusion.serving.text_stream import TextStream

pytestmark = pytest.mark.nemo

MODELS = Path(__file__).parents[1] / "golden" / "models"
SPACE, THE = 257, 258


def saved(folder, tokenizer, special, **roles):
    """NeMo's tokenizer of files with special tokens, of which some have a role."""
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles).save_pretrained(folder)
    return AutoTokenizer(str(folder))


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """Spells in bytes, of which byte i is token i + 1, as LLaMA 2's does."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the"]
    vocabulary = {name: id for id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return TextDecoder(saved(tmp_path_factory.mktemp("bytes"), tokenizer, ["<eos>"], eos_token="<eos>"))


@pytest.fixture(scope="module")
def with_many_roles(tmp_path_factory):
    """A tokenizer of bytes with 30 special tokens, the last of which has no role; its wrapper, and what decodes it."""
    vocabulary = {name: id for id, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    names = [f"<|{index}|>" for index in range(30)]
    folder = tmp_path_factory.mktemp("roles")
    nemo = saved(folder, tokenizer, names, eos_token=names[0], additional_special_tokens=names[1:-1])
    return nemo, TextDecoder(nemo)


def spelled(text):
    return [byte + 1 for byte in text.encode()]


def test_special_tokens_are_left_out_whether_or_not_they_have_a_role(with_many_roles):
    nemo, decode = with_many_roles
    ids = [nemo.token_to_id(token) for token in ("a", "<|0|>", "b", "<|5|>", "<|29|>", "c")]
    assert decode(ids) == "abc" == nemo.tokenizer.decode(ids, skip_special_tokens=True)


def test_added_tokens_get_no_spaces_from_tokenizers_in_python(tmp_path):
    vocabulary = {name: id for id, name in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = GPT2Tokenizer(tmp_path / "vocab.json", tmp_path / "merges.txt")
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<im>", special=True)])
    tokenizer.save_pretrained(tmp_path)
    nemo = AutoTokenizer(str(tmp_path), use_fast=False)
    assert not nemo.tokenizer.is_fast
    assert TextDecoder(nemo)(nemo.tokenizer.encode("ab<tool>c<im>d")) == "ab<tool>cd"


def test_a_text_takes_no_longer_where_there_are_many_special_tokens(with_many_roles):
    nemo, decode = with_many_roles
    ids = [40] * 2_000

    def seconds(call):
        start = time.perf_counter()
        call(ids)
        return time.perf_counter() - start

    assert decode(ids) == nemo.ids_to_text(ids)
    assert min(seconds(decode) for _ in range(5)) < min(seconds(nemo.ids_to_text) for _ in range(5)) / 4


@pytest.mark.parametrize("name", ["sdar", "a2d_llama", "llada", "dream", "llada2_moe"])
def test_texts_are_those_of_the_tokenizer(name):
    nemo = AutoTokenizer(str(MODELS / name))
    ids = [id for id in range(len(nemo.tokenizer)) if id not in nemo.tokenizer.added_tokens_decoder]
    assert TextDecoder(nemo)(ids) == nemo.ids_to_text(ids) != ""


@pytest.mark.parametrize(
    "ids, text",
    [
        (spelled("🙂é"), "🙂é"),
        (spelled("🙂🙂")[:6], "🙂\N{REPLACEMENT CHARACTER}"),
        ([*spelled("🙂"), 0xFF + 1, *spelled("é"), THE], "🙂\N{REPLACEMENT CHARACTER}é the"),
        ([THE, SPACE, *spelled("a")], "the a"),
        ([], ""),
    ],
)
def test_a_byte_that_fits_nowhere_spoils_no_other_character(of_bytes, ids, text):
    assert of_bytes(ids) == text


def test_a_text_that_grows_takes_nothing_back(of_bytes):
    for seed in range(300):
        draw = random.Random(seed)
        ids = [
            id
            for _ in range(draw.randint(1, 8))
            for id in draw.choice([spelled("é"), spelled("🙂"), [draw.randint(1, 256)], [THE], [SPACE]])
        ][: draw.randint(1, 20)]
        stream = TextStream(of_bytes)
        pieces = [stream.push(ids[:end], last=end == len(ids)) for end in range(1, len(ids) + 1)]
        assert "".join(pieces) == of_bytes(ids), seed


def test_a_tokenizer_of_another_kind_decodes_by_itself():
    assert TextDecoder(MockTokenizer(20))([7, 12]) == "7 12"
