"""Exercises with tools: calls follow what is offered, results are right, a tool for something else is left alone."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from typing import Any

import pytest

from strata.serve.replies.reply_parser import ReplyParser, collect
from strata.train.score import extract_answer
from strata.train.tasks.example import Example
from strata.train.tasks.mixture import TOOL_TASKS, document
from strata.train.tasks.smalltalk import UNKNOWN

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SIGNS = {"+": "+", "-": "-", "*": "×", "/": "÷"}
WORDS = {"add": "+", "plus": "+", "sum": "+", "subtract": "-", "minus": "-", "difference": "-"}
WORDS |= {"multiply": "×", "times": "×", "product": "×", "divide": "÷", "divided_by": "÷", "quotient": "÷"}


@pytest.fixture(scope="module")
def by_task() -> dict[str, list[Example]]:
    return {
        task.name: [task.sample(rng) for _ in range(400)] for task in TOOL_TASKS if (rng := random.Random(task.name))
    }


@pytest.fixture(scope="module")
def calling(by_task: dict[str, list[Example]]) -> list[Example]:
    return [example for examples in by_task.values() for example in examples if example.call is not None]


def test_every_call_is_one_that_the_parser_reads_and_the_schema_allows(calling: list[Example]) -> None:
    assert len(calling) == 1200
    for example in calling:
        parser = ReplyParser("hermes", reasoning=False)
        reply = collect(parser.append(example.written[0]) + parser.finish())
        assert reply.content == ""
        (made,) = reply.tool_calls
        offered = {tool["name"]: tool["parameters"] for tool in (one.schema["function"] for one in example.tools)}
        assert len(offered) == len(example.tools)
        _check(json.loads(made.arguments), offered[made.name])


def _check(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
    types = {"string": str, "number": (int, float), "integer": int}
    for name, value in arguments.items():
        wanted = schema["properties"][name]
        assert isinstance(value, types[wanted["type"]])
        assert value in wanted.get("enum", [value])


def test_arguments_are_in_the_question(calling: list[Example]) -> None:
    """Or in the tool's own list of values; only the one of "how many are in one" goes without saying."""
    for example in calling:
        assert example.call is not None
        tool = next(tool for tool in example.tools if tool.name == example.call.name)
        choices = {one.name: one.choices for one in tool.arguments}
        for name, value in example.call.arguments:
            if not choices[name]:
                parts = NUMBER.findall(str(value)) if example.task == "calling a calculator" else [str(value)]
                for part in parts:
                    stated = part.removesuffix(".0") if isinstance(value, float) else part
                    assert stated.lower() in example.question.lower(), (example.question, example.call)


def test_replies_hold_the_result_and_end_in_the_answer(calling: list[Example]) -> None:
    for example in calling:
        assert example.call is not None
        assert example.answer is not None
        assert extract_answer(example.reply) == example.answer
        if example.answer == "unknown":
            continue
        told = example.call.result
        for part in re.findall(r"[\w.:-]+", example.answer):
            assert part in told or part in example.question, (told, example.answer)


def test_calculators_give_the_right_result(by_task: dict[str, list[Example]]) -> None:
    beyond = 0
    for example in by_task["calling a calculator"]:
        assert example.call is not None
        values = dict(example.call.arguments)
        written = next((v for v in values.values() if isinstance(v, str) and any(c.isdigit() for c in v)), None)
        if written is not None:
            a, typed, b = written.split(" ")
            sign = SIGNS[typed]
        else:
            a, b = (str(v) for v in values.values() if not isinstance(v, str))
            named = next((v for v in values.values() if isinstance(v, str)), example.call.name)
            sign = SIGNS.get(named) or next(WORDS[word] for word in WORDS if word in named)
        x, y = Fraction(a), Fraction(b)
        right = {"+": x + y, "-": x - y, "×": x * y, "÷": x / y if y else None}[sign]
        assert right is not None
        assert example.answer is not None
        assert abs(Fraction(example.answer) - right) <= (Fraction(1, 10**6) if sign == "÷" else 0)
        assert example.reply.split(" ")[1] == sign
        beyond += max(x, y) >= 10_000 or "." in a + b or (sign in "×÷" and min(x, y) >= 10)
    # Mostly what no exercise teaches to compute, so that the result has to be read.
    assert beyond > 200


def test_backwards_questions_are_calculated_as_they_are_meant(by_task: dict[str, list[Example]]) -> None:
    seen = 0
    for example in by_task["calling a calculator"]:
        found = re.search(r"([Ss]ubtract|[Tt]ake) ([\d.]*\d) (?:away )?from ([\d.]*\d)", example.question)
        if found:
            seen += 1
            assert example.reply.startswith(f"{found[3]} - {found[2]} = ")
    assert seen > 3


def test_names_and_arguments_are_many(calling: list[Example]) -> None:
    tools = [tool for example in calling for tool in example.tools]
    assert len({tool.name for tool in tools}) > 300
    assert len({one.name for tool in tools for one in tool.arguments}) > 50
    assert any(len(example.tools) == 1 for example in calling)
    assert any(len(example.tools) == 4 for example in calling)


def test_tools_of_no_use_are_left_alone(by_task: dict[str, list[Example]]) -> None:
    own = {"+": "add|plus|sum|calc|comput|math|arith|eval|solve", "in": "convert|unit|factor"}
    for example in by_task["tools of no use"]:
        assert example.tools
        assert example.call is None
        names = " ".join(tool.name for tool in example.tools)
        if re.fullmatch(r"\d+ ?\+ ?\d+( =)?", example.question):
            assert not re.search(own["+"], names), (example.question, names)
        if re.match(r"[Cc]onvert ", example.question):
            assert not any(re.search(own["in"], name) and "look" not in name for name in names.split()), names


def test_documents_with_tools_offer_the_same_ones_in_every_turn() -> None:
    documents = [document(0, index) for index in range(3000)]
    with_tools = [one for one in documents if one.tools]
    assert 0.15 < len(with_tools) / len(documents) < 0.25
    examples = [example for one in with_tools for example in one.examples]
    assert all(example.tools == one.tools for one in with_tools for example in one.examples)
    calls = sum(example.call is not None for example in examples) / len(examples)
    assert 0.5 < calls < 0.7
    unknown = sum(example.reply == UNKNOWN for example in examples) / len(examples)
    assert 0.05 < unknown < 0.2
    assert all(example.call is None for one in documents if not one.tools for example in one.examples)
    assert any(len(one.examples) > 1 for one in with_tools)
