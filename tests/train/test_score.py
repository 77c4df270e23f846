"""What counts as a right reply."""

from __future__ import annotations

import pytest

from strata.train.score import Score, extract_answer, makes, questions, score
from strata.train.tasks.example import Example
from strata.train.tasks.tool import ExerciseCall


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("ones: 7 + 8 = 15\nAnswer: 85", "85"),
        ("Answer: 3000 m\n", "3000 m"),
        ("Answer: 1\nAnswer:  2 \nmore", "2"),
        ("85", None),
        ("", None),
    ],
)
def test_extract_answer(reply: str, answer: str | None) -> None:
    assert extract_answer(reply) == answer


def test_score_counts_by_task() -> None:
    def asked(task: str, answer: str) -> Example:
        return Example(task, "?", f"Answer: {answer}", answer, "p", True)

    examples = [asked("a", "1"), asked("b", "2"), asked("a", "3")]
    assert score(examples, ["Answer: 1", "Answer: 22", "3"]) == [Score("a", 1, 2), Score("b", 0, 1)]


def test_only_held_out_questions_are_asked() -> None:
    asked = questions(5)
    assert all(example.held_out and example.answer for example in asked)
    assert {"calling a calculator", "calling a look-up", "tools of no use"} <= {example.task for example in asked}
    named = {"two-digit addition", "two-digit subtraction", "sorting five numbers", "word reversal", "unit conversion"}
    assert named <= {example.task for example in asked}


@pytest.mark.parametrize(
    ("inside", "right"),
    [
        ('{"name": "add", "arguments": {"a": 1, "b": "x"}}', True),
        ('{"arguments": {"b": "x", "a": 1}, "name": "add"}', True),
        ('{"name": "sum", "arguments": {"a": 1, "b": "x"}}', False),
        ('{"name": "add", "arguments": {"a": 2, "b": "x"}}', False),
        ('{"name": "add", "arguments": {"a": 1}}', False),
        ('{"name": "add", "arguments": {"a": 1, "b": "x"}', False),
    ],
)
def test_a_call_counts_by_what_it_says(inside: str, right: bool) -> None:
    call = ExerciseCall("add", (("a", 1), ("b", "x")), "3")
    assert makes(f"<tool_call>\n{inside}\n</tool_call>", call) == right
    assert not makes(f"Well: <tool_call>\n{inside}\n</tool_call>", call)
    assert not makes(inside, call)
