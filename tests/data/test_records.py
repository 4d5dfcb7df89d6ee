"""What each shape becomes, by hand."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_cache.data.inputs import UnusableError
from dflash_cache.data.records import Conversation, Message, parse_record

CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def parse(record: dict[str, Any]) -> Conversation:
    return parse_record(record, "a:1")[1]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "Add.", "input": "1, 2", "output": "3"}, [("user", "Add.\n\n1, 2"), ("assistant", "3")]),
        ({"instruction": "Sing.", "input": "", "output": "La."}, [("user", "Sing."), ("assistant", "La.")]),
        ({"instruction": "", "input": "Sing.", "output": "La."}, [("user", "Sing."), ("assistant", "La.")]),
        ({"instruction": "Sing.", "output": "", "text": "the prompt as a whole"}, [("user", "Sing.")]),
        (
            {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"},
            [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
        ),
        (
            {"system": "s", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            [("system", "s"), ("user", "a"), ("assistant", "b")],
        ),
        (
            {"system": "s", "messages": [{"role": "developer", "content": "t"}, {"role": "user", "content": "a"}]},
            [("system", "t"), ("user", "a")],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            [("user", "ab")],
        ),
    ],
)
def test_shapes_become_roles_and_contents(record: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert [(message.role, message.content) for message in parse(record).messages] == expected


def test_tool_calls_tools_and_reasoning_reach_the_template_in_transformers_shape() -> None:
    for arguments in ({"at": "sky"}, '{"at": "sky"}'):
        for tools in ([TOOL], json.dumps([TOOL["function"]])):
            call = {"id": "c1", "function": {"name": "look", "arguments": arguments}}
            record = {
                "messages": [
                    {"role": "user", "content": "Rain?"},
                    {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "I must look."},
                    {"role": "tool", "content": "", "tool_call_id": "c1", "name": "look"},
                    {"role": "assistant", "content": "No."},
                ],
                "tools": tools,
            }
            conversation = parse(record)
            assert conversation.tools == (TOOL,)
            assert [message.as_dict() for message in conversation.messages] == [
                {"role": "user", "content": "Rain?"},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "I must look.",
                    "thinking": "I must look.",
                    "tool_calls": [CALL | {"id": "c1"}],
                },
                {"role": "tool", "content": "", "name": "look", "tool_call_id": "c1"},
                {"role": "assistant", "content": "No."},
            ]


def test_function_calls_of_sharegpt_are_tool_calls() -> None:
    turns = [("human", "Rain?"), ("function_call", json.dumps(CALL["function"])), ("observation", "dry"), ("gpt", "No")]
    conversation = parse({"conversations": [{"from": role, "value": value} for role, value in turns]})
    assert conversation.messages == (
        Message("user", "Rain?"),
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "dry"),
        Message("assistant", "No"),
    )


def test_a_tool_has_the_last_word_only_if_an_answer_is_wanted_and_text_wants_none() -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "tool", "content": "c"}]
    assert parse({"messages": asked}).needs_answer
    assert not parse({"messages": asked[:2]}).needs_answer
    assert not parse({"text": "a"}).needs_answer
    assert parse({"text": " a\n"}) == Conversation((), "a:1", text=" a\n")


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ({"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}]}, "wrong role order", "1"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]}, "wrong role order", "2"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "invalid tool call", "by the user"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "invalid tool call", "not valid JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": 3}]}]}, "invalid tool call", "function.name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[]"}]}]},
            "invalid tool call",
            "arguments are not an object",
        ),
        ({"prompt": "x", "tools": "{"}, "invalid tools", "not valid JSON"),
        ({"prompt": "x", "tools": [3]}, "invalid tools", "not a list of objects"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is not a string", ""),
        ({"instruction": "x", "history": [["a"]]}, "history is no list of pairs", ""),
        ({"instruction": None, "text": " "}, "empty content", ""),
        ({"text": "\ud800"}, "invalid Unicode", "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_used_has_a_reason(record: dict[str, Any], reason: str, detail: str) -> None:
    with pytest.raises(UnusableError) as caught:
        parse(record)
    assert caught.value.args[0] == reason
    assert detail in caught.value.args[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "text", "type"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KEYS = ["messages", "conversations", "turns", "prompt", "response", "instruction", "input", "output", "history"]


# A fresh clone's first text makes hypothesis build its Unicode tables, a second that counts as slow input.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*KEYS, "text", "tools", "system"]), JSON, max_size=4))
def test_any_json_is_a_conversation_or_has_a_reason(record: dict[str, Any]) -> None:
    try:
        conversation = parse(record)
    except UnusableError:  # and nothing else
        return
    assert conversation.text is not None or "user" in [message.role for message in conversation.messages]
