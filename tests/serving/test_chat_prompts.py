from pathlib import Path

import pytest

from nemo_dllm.collections.diffusion.chat_prompts import ChatTemplate, read_template
from nemo_dllm.collections.diffusion.serving.served_model import ServedModel
from nemo_dllm.collections.diffusion.serving.server import serve

MODELS = Path(__file__).parents[1] / "golden" / "models"
TURNS = [
    {"role": "user", "content": "w5 w7"},
    {"role": "assistant", "content": "w9"},
    {"role": "user", "content": "w8"},
]
CHATML = (
    "{% for m in messages %}<|im_start|> {{ m.content }} <|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> {{ lead | default('w1') }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODELS / "a2d_qwen3")


def test_prompts_are_those_of_the_template(tokenizer):
    template = ChatTemplate(tokenizer, CHATML)
    reference = tokenizer.apply_chat_template(TURNS, chat_template=CHATML, add_generation_prompt=True)
    assert template.prompt(TURNS, {}) == reference
    assert template.prompt(TURNS, {"lead": "w2"}) == [*reference[:-1], 2]


def test_the_special_token_behind_an_answer_ends_it(tokenizer):
    assert ChatTemplate(tokenizer, CHATML).end_token_ids == (192,)
    assert ChatTemplate(tokenizer, CHATML.replace("<|im_end|>", "w3")).end_token_ids == ()
    one_turn = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}"
    assert ChatTemplate(tokenizer, one_turn).end_token_ids == ()


def test_the_tokenizers_own_template(tokenizer, kit):
    with pytest.raises(ValueError, match="no chat template; start with --chat-template FILE"):
        ChatTemplate(tokenizer)
    own = ServedModel(kit.ToyModel(), "toy").chat_template
    assert own.prompt(TURNS[:1], {}) == [*b"user: w5 w7", kit.TURN, *b"\nassistant: "]
    assert own.end_token_ids == (kit.TURN,)


@pytest.mark.parametrize(
    "jinja, variables",
    [
        ("{{ raise_exception('roles alternate') }}", {}),
        ("{{ 1 / divisor }}", {"divisor": 0}),
    ],
)
def test_refusals_of_a_template_are_errors_of_the_request(tokenizer, jinja, variables):
    with pytest.raises(ValueError, match="the chat template refuses the conversation: "):
        ChatTemplate(tokenizer, jinja).prompt(TURNS, variables)


def test_a_broken_template_is_found_before_the_first_request(kit):
    with pytest.raises(ValueError, match="the chat template refuses the conversation"):
        ServedModel(kit.ToyModel(), "toy", chat_template="{% for %}")


def test_templates_come_from_files(tmp_path):
    (tmp_path / "t.jinja").write_text(CHATML)
    assert read_template(tmp_path / "t.jinja") == CHATML and read_template(None) is None
    with pytest.raises(FileNotFoundError, match="absent.jinja does not exist; name a file with a Jinja template"):
        read_template(tmp_path / "absent.jinja")


def test_a_port_that_is_taken_is_an_error_before_the_model_is_loaded(server):
    with pytest.raises(ValueError, match="of host=127.0.0.1 cannot be used.*choose others"):
        serve("no checkpoint", port=int(server.url.rsplit(":", 1)[1]))


@pytest.mark.parametrize("name", ["add_generation_prompt", "chat_template", "messages", "tokenize", "tools"])
def test_only_variables_of_templates_may_be_set(tokenizer, name):
    with pytest.raises(ValueError, match=f"{name} may not be set: only variables of the template itself may"):
        ChatTemplate(tokenizer, CHATML).prompt(TURNS, {name: True})
