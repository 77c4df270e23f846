"""`strata chat`: what can be typed, and what is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from strata import LLM
from strata.cli.main import app
from strata.engine.sampling_params import SamplingParams

Conversation = list[dict[str, str]]


class Echo:
    """A model that answers with the last message in capitals, and keeps what it was asked."""

    asked: list[Conversation]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.asked = []
        Echo.newest = self  # type: ignore[attr-defined]

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def chat_prompt(self, messages: Conversation) -> Conversation:
        return messages

    def stream(self, messages: Conversation, _: SamplingParams) -> Iterator[Any]:
        self.asked.append(list(messages))
        text = messages[-1]["content"]
        if text == "fail":
            raise ValueError("the prompt is too long for [this] model")
        yield SimpleNamespace(outputs=[SimpleNamespace(text=text.upper())], error=None)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that types lines into a chat, and gives what is shown and the conversations that the model got."""
    monkeypatch.setattr("strata.engine.llm.LLM", Echo)

    def typed(*lines: str) -> tuple[str, list[Conversation]]:
        result = CliRunner().invoke(app, ["chat"], input="".join(f"{line}\n" for line in lines))
        assert result.exit_code == 0, result.exception
        return result.output, Echo.newest.asked  # type: ignore[attr-defined]

    return typed


def texts(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation]


def test_an_empty_line_is_not_the_end(talk: Any) -> None:
    shown, asked = talk("one", "", "   ", "two")
    assert "ONE" in shown
    assert [texts(one) for one in asked] == [["one"], ["one", "ONE", "two"]]


@pytest.mark.parametrize("command", ["/exit", "/quit", "/EXIT"])
def test_what_follows_the_exit_is_not_asked(talk: Any, command: str) -> None:
    _, asked = talk("one", command, "two")
    assert [texts(one) for one in asked] == [["one"]]


@pytest.mark.parametrize("command", ["/clear", "/new"])
def test_a_new_conversation_begins_with_nothing(talk: Any, command: str) -> None:
    _, asked = talk("one", command, "two")
    assert [texts(one) for one in asked] == [["one"], ["two"]]


def test_help_tells_of_every_command_and_of_several_lines(talk: Any) -> None:
    shown, asked = talk("/help")
    assert asked == []
    for word in ("/help", "/clear", "/new", "/exit", "/quit", "Ctrl-D", "\\", '"""'):
        assert word in shown


def test_a_command_that_is_none_is_not_asked(talk: Any) -> None:
    shown, asked = talk("/hlep", "/etc/hosts: what is it?")
    assert "there is no /hlep; /help" in shown
    assert [texts(one) for one in asked] == [["/etc/hosts: what is it?"]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["first \\", "second\\", "", "next"], "first \nsecond\n"),
        (['"""', "def f():", "    return 1", "", '"""'], "def f():\n    return 1"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""all of it"""'], "all of it"),
    ],
)
def test_a_message_of_several_lines(talk: Any, lines: list[str], message: str) -> None:
    _, asked = talk(*lines)
    assert asked[0][-1]["content"] == message.strip()


def test_a_message_that_failed_is_forgotten(talk: Any) -> None:
    shown, asked = talk("fail", "two")
    assert "the prompt is too long for [this] model (/clear begins a new conversation)" in " ".join(shown.split())
    assert texts(asked[-1]) == ["two"]


def test_nothing_is_printed_before_the_first_question(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["chat", "--model", str(folder), "--device", "cpu"], input="")
    assert result.exit_code == 0
    assert result.output.strip() == "you>"
    assert capfd.readouterr().err == ""


def test_an_llm_says_how_memory_is_divided_unless_told_not_to(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    LLM(folder, device="cpu", max_model_len=64)
    assert "KV pages" in capfd.readouterr().err
    LLM(folder, device="cpu", max_model_len=64, verbose=False)
    assert capfd.readouterr().err == ""
