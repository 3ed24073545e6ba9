"""Which tokens are answers, for templates of every manner: decoded, they are the assistant's words and the end."""

import json

import pytest
from transformers import AutoTokenizer

from nemo_dllm.collections.diffusion.data.chat import Conversation, read_conversation
from nemo_dllm.collections.diffusion.data.chat_encoder import ChatEncoder
from nemo_dllm.collections.diffusion.data.chat_template import ChatTemplate
from nemo_dllm.collections.diffusion.data.tokenizer import byte_tokenizer, train_byte_bpe

from .chat_templates import (
    CALLING,
    CHATML,
    FORGETFUL,
    INSTRUCTION,
    MARKED_CHATML,
    MARKED_WITHOUT_END,
    MERGING,
    NO_TOKENS,
    THINKING,
)

END = "<|im_end|>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    special = ("<|im_start|>", END)
    text = "assistant\n\n\nuser system hello there good answer [/INST] [INST] 12 + 30 = 42\n\n " * 20
    byte_tokenizer(root / "byte", special)
    train_byte_bpe([text], 340, root / "bpe", special)
    return root


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request, folders):
    return AutoTokenizer.from_pretrained(folders / request.param)


def chat(*turns, **last):
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": content} for role, content in zip(roles, turns, strict=False)]
    messages[-1] |= last
    return Conversation(messages)


def encoder_of(tokenizer, template, **options):
    return ChatEncoder(tokenizer, ChatTemplate(tokenizer, template, **options))


def answers(tokenizer, encoded):
    """The decoded runs of answer tokens."""
    runs = [[]]
    for token, is_answer in zip(*encoded, strict=True):
        if is_answer:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


TWO_TURNS = chat("hello", "  good answer\n", "there", "42 é😀")


@pytest.mark.parametrize("template", [CHATML, MARKED_CHATML, MARKED_WITHOUT_END])
def test_answers_and_their_end_tokens(tokenizer, template):
    encoder = encoder_of(tokenizer, template)
    encoded = encoder.encode(TWO_TURNS)
    assert answers(tokenizer, encoded) == ["  good answer\n" + END, "42 é😀" + END]
    expected = encoder.template._render(TWO_TURNS).rstrip("\n")
    assert tokenizer.decode(encoded.ids) == expected
    last = encoder_of(tokenizer, template, loss_turns="last").encode(TWO_TURNS)
    assert last.ids == encoded.ids
    assert answers(tokenizer, last) == ["42 é😀" + END]


def test_the_prompt_is_what_generation_starts_from(tokenizer):
    """Also where the tokenizer would join the header's newline with one of the answer."""
    conversation = chat("hello", "\n\n42")
    encoded = encoder_of(tokenizer, CHATML).encode(conversation)
    prompt = tokenizer.apply_chat_template(conversation.messages[:1], chat_template=CHATML, add_generation_prompt=True)
    assert encoded.ids[: len(prompt)] == prompt
    assert encoded.answer == [False] * len(prompt) + [True] * (len(encoded.ids) - len(prompt))
    assert answers(tokenizer, encoded) == ["\n\n42" + END]


THOUGHT = "<think>\nhm\n</think>\n\n"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    "conversation, expected, shown",
    [
        # Empty thoughts are the template's, not the assistant's.
        (chat("a", "42"), ["42"], EMPTY + "42"),
        (chat("a", EMPTY + "42"), ["42"], EMPTY + "42"),
        (chat("a", THOUGHT + "42"), [THOUGHT + "42"], THOUGHT + "42"),
        (chat("a", "<think>hm</think>42"), [THOUGHT + "42"], THOUGHT + "42"),
        (chat("a", "42", reasoning_content="hm"), [THOUGHT + "42"], THOUGHT + "42"),
        # Thoughts of earlier turns are not shown, and what is left is trained.
        (chat("a", THOUGHT + "1", "b", THOUGHT + "2", "c", "3"), ["1", "2", "3"], EMPTY + "3"),
        (chat("a", "1", "b", THOUGHT + "2"), ["1", THOUGHT + "2"], THOUGHT + "2"),
    ],
)
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}])
def test_thoughts(tokenizer, conversation, expected, shown, arguments):
    encoded = encoder_of(tokenizer, THINKING, template_arguments=arguments).encode(conversation)
    assert answers(tokenizer, encoded) == [words + END for words in expected]
    assert tokenizer.decode(encoded.ids).endswith(f"<|im_start|>assistant\n{shown}{END}")


def test_calls_of_tools_are_answers(tokenizer):
    call = {"function": {"name": "add", "arguments": {"a": 12}}}
    messages = [
        {"role": "user", "content": "12 + 30"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42"},
    ]
    encoded = encoder_of(tokenizer, THINKING).encode(Conversation(messages))
    called = f"\n<tool_call>\n{json.dumps(call['function'])}\n</tool_call>"
    assert answers(tokenizer, encoded) == [called + END, "42" + END]


def test_merged_system_and_renamed_roles(tokenizer):
    conversation = chat("ok", " ok ", "ok", "ok")
    conversation.messages.insert(0, {"role": "system", "content": "ok"})
    encoded = encoder_of(tokenizer, MERGING).encode(conversation)
    assert answers(tokenizer, encoded) == ["ok" + END] * 2
    assert tokenizer.decode(encoded.ids).startswith(f"<|im_start|>user\nok\n\nok{END}\n<|im_start|>model\nok{END}")
    with pytest.raises(ValueError, match="the chat template fails: roles must alternate"):
        encoder_of(tokenizer, MERGING).encode(Conversation([*chat("a", "b").messages, *chat("a", "b").messages[1:]]))


def test_a_field_of_calls_without_a_call(tokenizer):
    """As data sets have it in every turn; the template would take each for a call."""
    call = {"function": {"name": "add", "arguments": {"a": 12}}}
    turns = [{"role": "user", "content": "q", "tool_calls": []}, {"role": "assistant", "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "42"}, {"role": "assistant", "content": "42", "tool_calls": []}]
    encoded = encoder_of(tokenizer, CALLING).encode(read_conversation({"messages": turns}))
    assert answers(tokenizer, encoded) == [json.dumps(call["function"]) + END, "42" + END]


def test_thoughts_that_the_template_forgets(tokenizer):
    encoded = encoder_of(tokenizer, FORGETFUL).encode(chat("a", THOUGHT + "1", "b", "<think>x</think>2"))
    assert answers(tokenizer, encoded) == ["\n\n1" + END, "2" + END]
    assert "think" not in tokenizer.decode(encoded.ids)


@pytest.mark.parametrize("template", [CHATML, THINKING])
def test_words_of_the_private_use_area(tokenizer, template):
    """Symbols of some fonts: what stands for a turn must not be in the text."""
    encoded = encoder_of(tokenizer, template).encode(chat("\ue000\ue001", "a\ue000b", "\ue002", "\ue003"))
    assert answers(tokenizer, encoded) == ["a\ue000b" + END, "\ue003" + END]


def test_stripped_answers_and_an_end_token_after_a_space(tokenizer):
    conversation = chat("hello", "  good answer \n", "there", "42")
    conversation.messages.insert(0, {"role": "system", "content": "system"})
    encoded = encoder_of(tokenizer, INSTRUCTION).encode(conversation)
    eos = tokenizer.eos_token
    assert answers(tokenizer, encoded) == [f"good answer {eos}", f"42 {eos}"]
    assert tokenizer.decode(encoded.ids) == (
        f"[INST] system\n\nhello [/INST] good answer {eos}[INST] there [/INST] 42 {eos}"
    )


def test_a_template_without_tokens_ends_with_the_end_of_text(tokenizer):
    encoded = encoder_of(tokenizer, NO_TOKENS).encode(TWO_TURNS)
    assert answers(tokenizer, encoded) == ["  good answer\n", "42 é😀" + tokenizer.eos_token]


def test_prompt_and_answer_as_they_stand(tokenizer):
    encoder = encoder_of(tokenizer, "")
    encoded = encoder.encode(chat("hello ", "there"))
    assert tokenizer.decode(encoded.ids) == "hello there" + tokenizer.eos_token
    assert answers(tokenizer, encoded) == ["there" + tokenizer.eos_token]
    with pytest.raises(ValueError, match="joins a prompt and an answer, but the turns are user, assistant, user, ass"):
        encoder.encode(TWO_TURNS)


def test_pieces_that_get_a_space_of_their_own(tmp_path):
    """As SentencePiece does: encoding the answer apart would change the text, so offsets decide."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["▁[INST]", "▁a", "▁[/INST]", "▁b", "▁", "▁x[/INST]c", "<unk>"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    template = (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content }}"
    )
    encoded = encoder_of(tokenizer, template + "{% endfor %}").encode(chat("a", "b"))
    assert tokenizer.convert_ids_to_tokens(encoded.ids) == ["▁[INST]", "▁a", "▁[/INST]", "▁b", "</s>"]
    assert encoded.answer == [False, False, False, True, True]
    with pytest.raises(ValueError, match=r"the token 'x\[/INST\]c' reaches from a prompt into an answer|' x"):
        glued = "{% for m in messages %}{{ m.content + '[/INST]' if m.role == 'user' else m.content }}{% endfor %}"
        encoder_of(tokenizer, glued).encode(chat("x", "c"))


REWRITING = {
    "makes 'GOOD' of turn 1": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "shows turn 1 2 times": "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "shows turn 1 0 times": "{% for m in messages %}{{ m.role }}{% endfor %}",
    "renders the rest of the conversation otherwise because of turn 1": (
        "{{ messages[1].content | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "marks 0 generations in 1 turns": "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
    "the chat template fails: no": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("message", REWRITING)
def test_refuses_what_it_cannot_tell_exactly(folders, message):
    tokenizer = AutoTokenizer.from_pretrained(folders / "byte")
    with pytest.raises(ValueError, match=message):
        encoder_of(tokenizer, REWRITING[message]).encode(chat("hello", "good"))


def test_where_the_template_comes_from(folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(folders / "byte")
    with pytest.raises(ValueError, match="the tokenizer has no chat template; pass chat_template"):
        ChatEncoder(tokenizer)
    with pytest.raises(FileNotFoundError, match="chat_template='nowhere.jinja' is neither a file nor a Jinja template"):
        encoder_of(tokenizer, "nowhere.jinja")
    with pytest.raises(ValueError, match="loss_turns='first' is unknown; known: all, last"):
        encoder_of(tokenizer, CHATML, loss_turns="first")
    (tmp_path / "chat.jinja").write_text(CHATML)
    tokenizer.chat_template = CHATML
    expected = ChatEncoder(tokenizer).encode(TWO_TURNS)
    assert encoder_of(tokenizer, tmp_path / "chat.jinja").encode(TWO_TURNS) == expected
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos_token"):
        ChatEncoder(tokenizer)
