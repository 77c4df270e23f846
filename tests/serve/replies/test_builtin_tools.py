"""Tools with the built-in model through a plain `strata serve`; and what is reasoning in a reply."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import OpenAI

from strata.serve.replies.reasoning import opens_reasoning
from strata.serve.replies.reply_events import ContentDelta, ReasoningDelta
from strata.serve.replies.reply_parser import ReplyParser, collect
from tests.serve.running import Running, running

MODEL = "builtin"


def tool(name: str, description: str, **properties: dict[str, Any]) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT, NUMBER = {"type": "string"}, {"type": "number"}
CALCULATOR = tool("calculator", "Evaluate a math expression.", expression=TEXT)
DIVIDE = tool("divide", "The quotient of two numbers.", x=NUMBER, y=NUMBER)
CONVERT = tool("convert_units", "Converts units.", value=NUMBER, from_unit=TEXT, to_unit=TEXT)
WEATHER = tool("get_weather", "Get the weather of a given city.", city=TEXT)

# Tools, question, call, result, answer. No result is one that the model could have worked out or known.
CASES: list[tuple[list[Any], str, str, dict[str, Any], str, str]] = [
    ([CALCULATOR], "What is 48213 * 39772?", "calculator", {"expression": "48213 * 39772"}, "1917527436", "1917527436"),
    ([DIVIDE, WEATHER], "Divide 8123 by 77.", "divide", {"x": 8123, "y": 77}, '{"result": 105.493506}', "105.493506"),
    (
        [WEATHER, CONVERT], "Convert 12 miles to furlongs.", "convert_units",
        {"value": 12, "from_unit": "miles", "to_unit": "furlongs"}, "96.3", "96.3 furlongs",
    ),
    ([WEATHER], "What is the weather in Lisbon?", "get_weather", {"city": "Lisbon"}, "windy", "windy"),
    ([CALCULATOR, WEATHER], "What is the weather in Oslo?", "get_weather", {"city": "Oslo"}, "snowy", "snowy"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:  # told nothing of tools
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(("tools", "question", "name", "arguments", "result", "answer"), CASES)
def test_a_round_trip(
    client: OpenAI, tools: list[Any], question: str, name: str, arguments: dict[str, Any], result: str, answer: str
) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    asked = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0]
    assert asked.finish_reason == "tool_calls"
    assert not asked.message.content
    (call,) = asked.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == name
    assert json.loads(call.function.arguments) == arguments
    told = {"role": "tool", "tool_call_id": call.id, "content": result}
    messages += [asked.message.model_dump(exclude_none=True), told]
    answered = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0]
    assert answered.finish_reason == "stop"
    assert answered.message.content is not None
    assert answered.message.content.endswith(f"Answer: {answer}")


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_streamed(client: OpenAI, case: tuple[list[Any], str, str, dict[str, Any], str, str]) -> None:
    tools, question, name, arguments, result, answer = case
    messages: list[Any] = [{"role": "user", "content": question}]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
        asked = stream.get_final_completion().choices[0]
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    function = {"name": call.function.name, "arguments": call.function.arguments}
    called = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    messages += [called, {"role": "tool", "tool_call_id": call.id, "content": result}]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(pieces).endswith(f"Answer: {answer}")


def test_a_round_trip_of_responses(client: OpenAI) -> None:
    tools: list[Any] = [{"type": "function", **WEATHER["function"]}]
    asked = client.responses.create(model=MODEL, input="What is the weather in Lisbon?", tools=tools)
    (call,) = asked.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Lisbon"}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "windy"}
    answered = client.responses.create(model=MODEL, previous_response_id=asked.id, input=[output], tools=tools)
    assert answered.output_text.endswith("Answer: windy")


@pytest.mark.parametrize(
    ("question", "end"),
    [
        ("What is 47 + 38?", "Answer: 85"),
        ("Sort 42, 7, 19", "Answer: 7 19 42"),
        ("Spell the word planet.", "Answer: p l a n e t"),
    ],
)
def test_a_tool_for_something_else_is_left_alone(client: OpenAI, question: str, end: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for tools in ([WEATHER], [WEATHER, CONVERT]):
        choice = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0]
        assert choice.message.tool_calls is None
        assert choice.message.content is not None
        assert choice.message.content.endswith(end)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "divide"}}])
def test_a_forced_call_is_the_one_that_fits(client: OpenAI, choice: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Divide 8123 by 77."}]
    (call,) = (
        client.chat.completions.create(
            model=MODEL, messages=messages, tools=[WEATHER, DIVIDE], tool_choice=choice, parallel_tool_calls=False
        )
        .choices[0]
        .message.tool_calls
        or ()
    )
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("divide", {"x": 8123, "y": 77})


def test_tools_of_no_one_are_called_by_no_one(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    choice = client.chat.completions.create(model=MODEL, messages=messages).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert choice.message.content is not None
    assert "<tool_call>" not in choice.message.content


texts = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</", "<", "nk>", "\n", " ", "a", "so ", "ü🙂", "\n\n"]),
    max_size=12,
).map("".join)


def split(text: str, opened: bool = False, sizes: list[int] | None = None) -> tuple[str, str]:
    """(reasoning, content) of a reply cut into pieces of these sizes and a rest."""
    parser = ReplyParser(None, reasoning=True, in_reasoning=opened)
    events = []
    for size in sizes or []:
        events += parser.append(text[:size])
        text = text[size:]
    whole = collect(events + parser.append(text) + parser.finish())
    return whole.reasoning, whole.content


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nOne and one.\n</think>\n\nTwo.", False, ("One and one.", "Two.")),
        ("One and one.\n</think>\n\nTwo.", True, ("One and one.", "Two.")),
        ("<think>\nOne.\n</think>\n\nTwo.", True, ("One.", "Two.")),
        ("<think>\n\n</think>\n\nTwo.", False, ("", "Two.")),
        ("<think>never ends", False, ("never ends", "")),
        ("never ends", True, ("never ends", "")),
        ("Two.", False, ("", "Two.")),
        ("Two. <think>no</think>", False, ("", "Two. <think>no</think>")),
        ("One</think>Two", False, ("", "One</think>Two")),
        ("<thinking>", False, ("", "<thinking>")),
        ("<think>a</thinker>b</think>c", False, ("a</thinker>b", "c")),
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        (" ", False, ("", " ")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_is_what_stands_between_the_tags(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split(text, opened) == expected


def test_a_thought_is_shown_as_it_comes() -> None:
    parser = ReplyParser(None, reasoning=True)
    assert parser.append("<think>\n") == []
    assert parser.append("One") == [ReasoningDelta("One")]
    assert parser.append("\n</thi") == []
    assert parser.append("ef>") == [ReasoningDelta("\n</thief>")]
    assert parser.append("</think>\nTwo") == [ContentDelta("Two")]
    assert parser.append("\n") == [ContentDelta("\n")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
    ],
)
def test_the_prompt_says_whether_the_reply_begins_inside_the_tags(prompt: str, opened: bool) -> None:
    assert opens_reasoning(prompt) == opened


@given(texts, st.booleans(), st.lists(st.integers(1, 5), max_size=30))
@settings(max_examples=400, deadline=None)
def test_any_pieces_give_what_one_expression_over_the_whole_gives(text: str, opened: bool, sizes: list[int]) -> None:
    start = r"(?:\s*<think>)?" if opened else r"\s*<think>"
    closed = re.fullmatch(rf"{start}\n*(.*?)\n*</think>\n*(.*)", text, re.DOTALL)
    unclosed = re.fullmatch(rf"{start}\n*(.*)", text, re.DOTALL)
    found = closed or unclosed
    expected = (found[1], found[2] if closed else "") if found else ("", text)
    assert split(text, opened, sizes) == expected
