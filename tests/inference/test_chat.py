import io
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
TEMPLATE = (
    "{% for message in messages %}{{ 'w1 ' if message['role'] == 'user' else 'w2 ' }}{{ message['content'] }} "
    "{{ '<|im_end|>' if message['role'] == 'assistant' }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
)


@pytest.fixture(scope="module")
def session(single_process):
    from nemo_dllm.collections.diffusion.inference.session import open_session

    settings = {"max_new_tokens": 8, "threshold": None, "seed": 0}
    return open_session(GOLDEN / "sdar", best=False, preset=None, settings=settings)


@pytest.fixture
def template_file(tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return tmp_path / "template.jinja"


def test_the_conversation_goes_on(session):
    from nemo_dllm.collections.diffusion.inference.chat import Chat

    chat = Chat(session, system="w9", chat_template=TEMPLATE)
    answers = [chat.answer("w5 w6"), chat.answer("w7")]
    assert [message["role"] for message in chat.messages] == ["system", *["user", "assistant"] * 2]
    assert [message["content"] for message in chat.messages[2::2]] == answers
    # What was said before matters.
    assert Chat(session, chat_template=TEMPLATE).answer("w7") != answers[1]
    chat.reset()
    assert [message["role"] for message in chat.messages] == ["system"]


def test_an_answer_ends_where_the_template_ends_a_turn(session):
    from nemo_dllm.collections.diffusion.inference.chat import Chat

    tokenizer = session.model.tokenizer.tokenizer
    end = next(str(t) for t in tokenizer.added_tokens_decoder.values() if t.special and str(t) != tokenizer.eos_token)
    ends = Chat(session, chat_template=TEMPLATE.replace("<|im_end|>", end))._session.config.stop_token_ids
    assert ends == (tokenizer.convert_tokens_to_ids(end),)
    no_end = TEMPLATE.replace("{{ '<|im_end|>' if message['role'] == 'assistant' }}", "")
    assert Chat(session, chat_template=no_end)._session.config.stop_token_ids == ()


def test_a_conversation_that_is_too_long_keeps_what_it_has(session):
    from nemo_dllm.collections.diffusion.inference.chat import Chat

    chat = Chat(session, chat_template=TEMPLATE)
    chat.answer("w5")
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"the conversation \(/reset starts anew\) has \d+ tokens, and the model's"):
        chat.answer(" ".join(["w5"] * 600))
    assert chat.messages == before
    # The last tokens of the context are an answer too, if a short one.
    room = Chat(session, chat_template=TEMPLATE)
    assert 0 <= len(room.answer(" ".join(["w5"] * 506)).split()) <= 6


def test_no_template_no_chat(session):
    from nemo_dllm.collections.diffusion.inference.chat import Chat

    with pytest.raises(ValueError, match="the tokenizer has no chat template; start with --chat-template FILE"):
        Chat(session)
    with pytest.raises(ValueError, match="the chat template refuses the conversation: no systems"):
        Chat(session, "w1", "{{ raise_exception('no systems') }}").answer("w5")


def test_the_command_talks_line_by_line(single_process, template_file, tmp_path, monkeypatch, capsys):
    from nemo_dllm.collections.diffusion.inference.chat import chat

    long = " ".join(["w5"] * 600)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"w5\n\n{long}\n/reset\nw5\n/quit\nw8\n"))
    replay = tmp_path / "replay.html"
    settings = {"max_new_tokens": 4, "threshold": None, "seed": 0}
    options = {"system": None, "chat_template": template_file, "template_variables": None}
    options |= {"watch": False, "best": False, "preset": None}
    chat(GOLDEN / "sdar", **options, replay=replay, settings=settings)
    printed = capsys.readouterr()
    first, second = printed.out.splitlines()
    assert first == second
    error, written = printed.err.splitlines()
    assert error.startswith("error: the conversation") and written == f"replay: {replay}"
    page = replay.read_text()
    # Answers alone are shown, under what was asked.
    assert page.count('"title": "w5"') == 8 and "w1 w5" not in page


def test_bytes_that_are_no_text_do_not_end_the_conversation(monkeypatch):
    from rich.console import Console

    from nemo_dllm.collections.diffusion.inference.chat import _said

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w5\n\xff w6\nw7\n"), encoding="utf-8"))
    assert list(_said(Console())) == ["w5", "\N{REPLACEMENT CHARACTER} w6", "w7"]


def test_variables_of_the_template(session, template_file, monkeypatch, capsys):
    from nemo_dllm.collections.diffusion.inference.chat import Chat, chat

    thinking = TEMPLATE.replace("w2{% endif %}", "w2{{ ' w8' if brief }}{% endif %}")
    said = [Chat(session, None, thinking, variables).answer("w5") for variables in (None, {}, {"brief": True})]
    assert said[0] == said[1] == Chat(session, None, TEMPLATE).answer("w5") != said[2]
    template_file.write_text(thinking)
    settings = {"max_new_tokens": 8, "threshold": None, "seed": 0}
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5\n"))
    chat(GOLDEN / "sdar", None, template_file, '{"brief": true}', False, None, False, None, settings)
    assert capsys.readouterr().out.strip() == said[2]
    for text in ("[1]", "brief=true", "null"):
        with pytest.raises(ValueError, match="is no JSON object; write"):
            chat(GOLDEN / "sdar", None, template_file, text, False, None, False, None, settings)
    with pytest.raises(ValueError, match="tokenize may not be set"):
        Chat(session, None, thinking, {"tokenize": True})
