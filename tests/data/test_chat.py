"""Rows in every shape give the same conversation."""

import pytest

from nemo_dllm.collections.diffusion.data.chat import read_conversation

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": [{**message, "name": None} for message in CHAT], "prompt": None},
        {"messages": None, "conversations": CHAT},
        {"messages": {"role": ["user", "assistant"], "content": ["q", "a"], "name": [None, None]}},
        {"conversations": [{"from": "Human", "value": "q"}, {"from": "GPT", "value": "a"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "user", "value": "q"}, {"role": "model", "content": "a"}], "id": 3},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, CHAT[1]]},
        {"prompt": "q", "completion": "a"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"messages": [CHAT[0], {**CHAT[1], "tool_calls": []}], "tools": ""},
        # What follows the last answer is left out.
        {"messages": [*CHAT, {"role": "user", "content": "more"}]},
    ],
)
def test_shapes(row):
    assert read_conversation(row) == (CHAT, None)


def test_own_column_names_win():
    row = {"question": "q", "answer": "a", "prompt": "no", "completion": "no"}
    assert read_conversation(row, {"prompt": "question", "completion": "answer"}).messages == CHAT
    assert read_conversation({"chat": CHAT}, {"messages": "chat"}).messages == CHAT


def test_system_tools_and_further_fields():
    assert read_conversation({"messages": CHAT, "system": "s"}).messages == [SYSTEM, *CHAT]
    assert read_conversation({"conversations": [SYSTEM, *CHAT], "system": "other"}).messages == [SYSTEM, *CHAT]
    assert read_conversation({"instruction": "q", "input": "i", "output": "a"}).messages[0]["content"] == "q\n\ni"
    tools = [{"name": "add"}]
    thoughts = [CHAT[0], {**CHAT[1], "reasoning_content": "hm"}]
    assert read_conversation({"messages": thoughts, "tools": tools}) == (thoughts, tools)
    assert read_conversation({"messages": thoughts, "tools": '[{"name": "add"}]'}) == (thoughts, tools)
    assert read_conversation({"messages": thoughts}).assistant_turns() == [1]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": []}, "there is no turn of the assistant"),
        ({"messages": [SYSTEM]}, "there is no turn of the assistant"),
        ({"messages": [CHAT[0]]}, "there is no turn of the assistant"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "turn 1 of the assistant is empty"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": " \n"}]}, "turn 1 of the assistant is empty"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "turn 0 has the role 'alien'; known: system, dev"),
        ({"messages": ["x"]}, "turn 0 is str, not a message"),
        ({"messages": "x"}, "field messages is str, not a list"),
        ({"messages": {"role": ["user"], "content": []}}, "field messages is dict, not a list"),
        ({"messages": [{"role": "user", "content": 3}, CHAT[1]]}, "turn 0 has content of type int, not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT[1]]},
            "turn 0 has content other than text",
        ),
        ({"prompt": 3, "completion": "a"}, "field prompt is int, not a list of messages"),
        ({"instruction": 3, "output": "a"}, "field instruction is int, not text"),
        ({"prompt": "q", "text": "x"}, "there are no fields messages, .* only prompt, text; name them with `columns`"),
        ({"prompt": "q", "completion": None}, r"only prompt, completion \(null\); name"),
        (
            {"messages": [CHAT[0], {**CHAT[1], "reasoning_content": ["hm"]}]},
            "turn 1 has reasoning_content of type list",
        ),
        ({"messages": CHAT, "tools": "{"}, "field tools is text that is not JSON, Expecting"),
        ({"messages": CHAT, "tools": ["add"]}, "field tools is not a list of JSON schemas"),
        ({}, "only none"),
    ],
)
def test_rows_without_an_answer(row, message):
    with pytest.raises(ValueError, match=message):
        read_conversation(row)


def test_unknown_column():
    with pytest.raises(ValueError, match="has unknown question; known: messages, conv"):
        read_conversation({"messages": CHAT}, {"question": "x"})
