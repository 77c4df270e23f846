"""Messages and tools in the one form that chat templates are given, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.text.messages import messages_for_template, says_nothing, text_of, tools_for_template

TEXTS = st.text(max_size=5)
TYPES = st.sampled_from(["text", "input_text", "output_text"])
PARTS = st.lists(st.fixed_dictionaries({"type": TYPES, "text": TEXTS}))
CONTENTS = st.none() | TEXTS | PARTS
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-5, 5) | TEXTS, lambda one: st.lists(one, max_size=2))
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)
ARGUMENTS = st.none() | OBJECTS | OBJECTS.map(json.dumps) | VALUES.map(json.dumps) | TEXTS
CALLS = st.builds(
    lambda name, arguments, id: {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}},
    TEXTS,
    ARGUMENTS,
    st.none() | TEXTS,
)
OF_ASSISTANT = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        "content": CONTENTS,
        "refusal": st.none() | TEXTS,
        "tool_calls": st.none() | st.lists(CALLS, max_size=2),
        "reasoning_content": st.none() | TEXTS,
        "thinking": CONTENTS,
        "name": st.none() | TEXTS,
    },
)
OF_OTHERS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "tool"]), "content": TEXTS | PARTS},
    optional={"name": st.none() | TEXTS, "tool_calls": st.none() | st.just([]), "function_call": st.none()},
)


@given(st.lists(OF_ASSISTANT | OF_OTHERS, min_size=1, max_size=3))
@settings(max_examples=150)
def test_there_is_one_form(messages: list[dict[str, Any]]) -> None:
    before = json.dumps(messages)
    made = messages_for_template(messages)
    assert json.dumps(messages) == before
    assert messages_for_template(made) == made
    for one in made:
        assert isinstance(one["content"], str)
        assert one["role"] != "developer"
        assert None not in one.values()
        assert one.get("tool_calls") != []
        assert not one.keys() & {"thinking", "reasoning", "refusal"}
        for call in one.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            assert isinstance(arguments, dict) or not isinstance(json_or_none(arguments), dict)


def json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def test_a_call_needs_no_more_than_a_name_and_is_written_in_one_order() -> None:
    expected = {"type": "function", "function": {"name": "now", "arguments": {}}}
    for call in (
        {"function": {"name": "now"}},
        {"name": "now", "arguments": "{}"},
        {"type": "function", "function": {"arguments": "", "name": "now"}, "index": 0},
        {"id": None, "type": None, "function": {"arguments": None, "name": "now", "parsed": None}},
    ):
        (made,) = messages_for_template([{"role": "assistant", "tool_calls": [call]}])
        assert json.dumps(made["tool_calls"]) == json.dumps([expected])


def test_what_is_not_in_openais_messages_stays() -> None:
    """Templates have fields of their own, such as Phi-4-mini's tools."""
    message = {"role": "system", "content": "Be brief.", "tools": "[]", "weight": 0}
    assert messages_for_template([message]) == [message]
    observed = {"role": "observation", "content": "85"}
    assert messages_for_template([observed, {"role": "marker"}]) == [observed, {"role": "marker"}]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": 5}, r"messages\[1\]\.content must be a string or a list"),
        ({"role": "tool", "content": {"a": 1}}, r"messages\[1\]\.content must be a string or a list"),
        ({"role": "user", "content": None}, r"messages\[1\]\.content is missing"),
        ({"role": "developer"}, r"messages\[1\]\.content is missing"),
        ({"role": "user", "content": ["a"]}, r"messages\[1\]\.content\[0\] must be"),
        ({"role": "user", "content": [{"type": ["text"], "text": "a"}]}, r"content\[0\] must be"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}, r"content\[0\] must be"),
        ({"role": "assistant", "reasoning": {"a": 1}}, r"messages\[1\]\.reasoning must be a string or a list"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, r"content\[0\] .*only text is read"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, r"content\[0\] must be"),
        ({"role": "assistant", "tool_calls": {"name": "a"}}, r"messages\[1\]\.tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": ["a"]}, r"messages\[1\]\.tool_calls\[0\] must be like"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "name": "a"}]}, r"tool_calls\[0\] must be like"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": None}}]}, r"tool_calls\[0\] must be like"),
        ({"role": "assistant", "tool_calls": [{"name": "a", "arguments": [1]}]}, r"\[0\]: arguments must be an object"),
        ({"role": "assistant", "function_call": {"name": "a"}}, r"function_call is not supported: .* use tool_calls"),
        ({"role": "assistant", "audio": {"id": "a"}}, r"messages\[1\]\.audio is not supported: only text"),
    ],
)
def test_what_is_no_message_is_refused_by_its_place(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        messages_for_template([{"role": "user", "content": "Hi"}, message])


def test_tools_have_one_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    bare = {"name": "f", "parameters": schema}
    expected = [{"type": "function", "function": {"name": "f", "description": "", "parameters": schema}}]
    for tool in (
        bare,
        {"type": "function", **bare, "strict": True},
        {"type": "function", "function": {"strict": None, **bare, "description": None}},
        {"function": bare | {"parameters": json.dumps(schema)}},
    ):
        assert json.dumps(tools_for_template([tool])) == json.dumps(expected)
        assert tools_for_template(expected) == expected
    assert tools_for_template([]) is tools_for_template(None) is None
    # As transformers' get_json_schema has it, and Command-R's template reads.
    (kept,) = tools_for_template([bare | {"return": {"type": "integer"}}]) or ()
    assert kept["function"]["return"] == {"type": "integer"}


@pytest.mark.parametrize(
    "tools", [{"name": "f"}, "f", ["f"], [{"type": "web_search"}], [{}], [{"name": "f", "parameters": "int"}], [print]]
)
def test_what_is_no_tool_is_refused(tools: Any) -> None:
    with pytest.raises(ValueError, match="tools"):
        tools_for_template(tools)


@pytest.mark.parametrize(
    ("message", "silent"),
    [
        ({"role": "assistant"}, True),
        ({"role": "assistant", "content": " \n", "tool_calls": []}, True),
        ({"role": "assistant", "content": [], "reasoning_content": ""}, True),
        ({"role": "assistant", "content": "0"}, False),
        ({"role": "assistant", "refusal": "No."}, False),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, False),
        ({"role": "assistant", "reasoning": "Hm."}, False),
    ],
)
def test_which_turns_say_nothing(message: dict[str, Any], silent: bool) -> None:
    assert says_nothing(messages_for_template([message])[0]) == silent


def test_parts_are_joined_by_line_breaks() -> None:
    assert text_of([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}]) == "a\nb"
    assert text_of([{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "b"}]) == "No.\nb"
    assert text_of(None) == text_of([]) == ""
