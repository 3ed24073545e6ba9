"""Tokenizers of exports, as plain transformers loads them."""

import json

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizer

pytestmark = pytest.mark.nemo


@pytest.fixture
def convert(single_process, tmp_path):
    """Imports a folder, lets a function change the import, and exports it."""
    from nemo_dllm.connectors.conversion import import_checkpoint
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    def run(source, change=lambda imported: None, **options):
        imported = import_checkpoint(source, tmp_path / "nemo", **options)
        change(imported)
        return export_hf_checkpoint(imported, tmp_path / "hf")

    return run


def test_chat_templates_beside_the_first_survive(convert, make_twin):
    twin = make_twin("a2d_qwen3")
    (twin / "chat_template.jinja").write_text("{{ messages }}")
    (twin / "additional_chat_templates").mkdir()
    (twin / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    exported = convert(twin)
    assert AutoTokenizer.from_pretrained(exported).chat_template == {
        "default": "{{ messages }}",
        "tools": "{{ tools }}",
    }


@pytest.fixture
def forget_origin(request, caplog):
    """Makes an import one of a model that was trained from scratch, where the test asks for that."""

    def forget(imported):
        if request.param:
            (imported / "context" / "hf" / "nemo_dllm.json").unlink()
            caplog.clear()

    return forget


from_scratch = pytest.mark.parametrize("forget_origin", [False, True], indirect=True, ids=["imported", "from scratch"])


@pytest.mark.parametrize(("chosen", "named"), [(193, 193), (196, 196), (17, None), (199, None)])
@from_scratch
def test_special_tokens_are_named_as_the_mask(convert, models, forget_origin, chosen, named):
    """196 is the next one; text uses 17; the tokenizer has no 199."""
    exported = convert(models / "qwen3", forget_origin, mask_token_id=chosen)
    assert json.loads((exported / "config.json").read_text())["mask_token_id"] == chosen
    assert AutoTokenizer.from_pretrained(exported).mask_token_id == named


@from_scratch
def test_a_mask_text_under_another_id_does_not_name_that_one(convert, make_twin, forget_origin, caplog):
    """197 is the next one, but text cannot have the same token twice."""
    twin = make_twin("qwen3")
    content = json.loads((twin / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 196, "content": "<|mask|>"})
    (twin / "tokenizer.json").write_text(json.dumps(content))
    with caplog.at_level("WARNING"):
        exported = convert(twin, forget_origin, mask_token_id=197)
    assert json.loads((exported / "config.json").read_text())["mask_token_id"] == 197
    assert AutoTokenizer.from_pretrained(exported).mask_token_id is None
    assert (
        "mask token is 197, and its tokenizer has '<|mask|>' as token 196, which is none for this model" in caplog.text
    )


@from_scratch
def test_a_named_mask_token_that_is_another_than_the_model_s_is_told(convert, make_twin, forget_origin, caplog):
    twin = make_twin("sdar")
    before = (twin / "tokenizer_config.json").read_bytes()
    with caplog.at_level("WARNING"):
        exported = convert(twin, forget_origin, mask_token_id=17)
    assert AutoTokenizer.from_pretrained(exported).mask_token_id == 196
    assert "the model's mask token is 17, and its tokenizer has '<|MASK|>' as token 196" in caplog.text
    assert (twin / "tokenizer_config.json").read_bytes() == before


class CodeTokenizer(PreTrainedTokenizer):
    """Of a class that only its author's code has."""

    vocab_size = 4

    def get_vocab(self):
        return {f"w{number}": number for number in range(4)} | self.added_tokens_encoder

    def _convert_token_to_id(self, token):
        return int(token[1:])

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()


def test_a_tokenizer_that_cannot_be_read_again_does_not_lose_the_training(single_process, caplog):
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer as NemoTokenizer

    from nemo_dllm.connectors.families.qwen3 import QWEN3
    from nemo_dllm.connectors.hf_export import _tokenizer_files

    tokenizer = NemoTokenizer.__new__(NemoTokenizer)
    tokenizer.tokenizer = CodeTokenizer()
    with caplog.at_level("WARNING"):
        files = _tokenizer_files(tokenizer, 4, QWEN3)
    assert json.loads(files["tokenizer_config.json"])["tokenizer_class"] == "CodeTokenizer"
    assert "does not name the mask token 4: the tokenizer of" in caplog.text and "(CodeTokenizer)" in caplog.text
