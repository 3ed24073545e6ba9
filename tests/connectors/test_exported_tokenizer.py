"""Tokenizers of exports, as plain transformers loads them."""

import json

import pytest
from transformers import AutoTokenizer

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


@pytest.mark.parametrize(("chosen", "named"), [(193, 193), (196, 196), (17, None), (199, None)])
@pytest.mark.parametrize("from_scratch", [False, True])
def test_special_tokens_are_named_as_the_mask(convert, models, from_scratch, chosen, named):
    """196 is the next one; text uses 17; the tokenizer has no 199."""

    def forget_origin(imported):
        if from_scratch:
            (imported / "context" / "hf" / "nemo_dllm.json").unlink()

    exported = convert(models / "qwen3", forget_origin, mask_token_id=chosen)
    assert json.loads((exported / "config.json").read_text())["mask_token_id"] == chosen
    assert AutoTokenizer.from_pretrained(exported).mask_token_id == named
