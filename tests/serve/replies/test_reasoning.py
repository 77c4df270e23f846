"""What a model thought, split off what it answered."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.serve.replies.reasoning import opens_reasoning
from strata.serve.replies.reply_parser import ContentDelta, ReasoningDelta, ReplyParser, collect

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
