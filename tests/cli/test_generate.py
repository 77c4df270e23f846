"""`strata generate` and `strata chat` as a person uses them, on the built-in model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from strata import LLM
from strata.cli import main
from strata.cli.main import app
from strata.engine.faults import EngineFault
from strata.engine.sampling_params import SamplingParams

RUNNER = CliRunner()


def test_generate_answers_85() -> None:
    result = RUNNER.invoke(app, ["generate", "What is 47 + 38?", "--device", "cpu"])
    assert result.exit_code == 0
    assert "Answer: 85" in result.output
    assert "tokens/s" in result.output


def test_generate_json_gives_one_object_a_prompt() -> None:
    arguments = ["generate", "Reverse the word 'planet'.", "What is 12 - 5?", "--json", "--device", "cpu"]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [one["prompt"] for one in objects] == arguments[1:3]
    assert objects[0]["text"].endswith("tenalp")
    assert objects[1]["text"].endswith("7")
    assert all(one["finish_reason"] == "stop" for one in objects)


def test_a_request_that_fails_is_told_and_the_others_are_answered(broken: Path) -> None:
    options = f"--model {broken} --device cpu --max-tokens 4 --temperature 0".split()
    result = RUNNER.invoke(app, ["generate", "fox", "z", "--raw", "--json", *options])
    assert result.exit_code == 1
    sound, lost = (json.loads(line) for line in result.stdout.splitlines())
    assert sound["error"] is None
    assert sound["text"]
    assert (lost["text"], lost["finish_reason"]) == ("", "error")
    assert "NaN" in lost["error"]
    assert f"strata: error: 'z': {lost['error']}" in result.stderr
    chat = RUNNER.invoke(app, ["chat", *options], input="z\nfox\n\n")  # which goes on behind a reply that failed
    assert chat.exit_code == 0
    assert chat.output.count("the logits hold NaN") == 1


def test_a_fault_of_the_engine_is_a_message_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_down() -> None:
        raise EngineFault("out of memory")

    monkeypatch.setattr(main, "app", break_down)
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code == 1
    assert capsys.readouterr().err == "strata: error: out of memory\n"


def test_chat_answers_and_begins_anew() -> None:
    result = RUNNER.invoke(app, ["chat", "--device", "cpu"], input="What is 20 + 30?\n/clear\nWhat is 2 + 2?\n")
    assert result.exit_code == 0
    assert "Answer: 50" in result.output
    assert "Answer: 4" in result.output


def test_chat_without_a_template_is_refused(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            bare.joinpath(file.name).write_bytes(file.read_bytes())
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    result = RUNNER.invoke(app, ["chat", "--model", str(bare), "--device", "cpu"], input="hello\n")
    assert isinstance(result.exception, ValueError)
    assert "chat template" in str(result.exception)


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
@pytest.mark.parametrize(
    ("option", "value"), [("--top-p", "7"), ("--max-tokens", "-3"), ("--temperature", "nan"), ("--seed", "9" * 30)]
)
def test_an_option_of_sampling_is_refused_before_a_model_is_loaded(
    command: list[str], option: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.engine.llm.LLM", lambda *_, **__: pytest.fail("it was loaded"))
    result = RUNNER.invoke(app, [*command, option, value])
    assert isinstance(result.exception, ValueError)
    assert str(result.exception).startswith(f"{option[2:].replace('-', '_')} must be ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "hi", "--model", "/nowhere/at/all"], "does not exist"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens"),
        (["generate", "hi", "--dtype", "fp3"], "dtype"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_1(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["strata", *arguments])
    monkeypatch.setattr(main, "set_waiting", lambda _: None)  # of the threads of this process
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("strata: error:")
    assert words in line


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


@pytest.mark.parametrize(
    ("lines", "asked", "shown"),
    [
        (["one", "", "   ", "two"], [["one"], ["one", "ONE", "two"]], "ONE"),  # an empty line is not the end
        *((["one", end, "two"], [["one"]], "") for end in ("/exit", "/quit", "/EXIT")),
        *((["one", anew, "two"], [["one"], ["two"]], "") for anew in ("/clear", "/new")),
        (["/hlep", "/etc/hosts: what?"], [["/etc/hosts: what?"]], "there is no /hlep; /help"),
        (["first \\", "second\\", "", "next"], [["first \nsecond"], ["first \nsecond", "FIRST \nSECOND", "next"]], ""),
        (['"""', "def f():", "    return 1", "", '"""'], [["def f():\n    return 1"]], ""),
        (['"""one', 'two"""'], [["one\ntwo"]], ""),
        (['"""all of it"""'], [["all of it"]], ""),
        (["fail", "two"], [["fail"], ["two"]], "too long for [this] model (/clear begins a new conversation)"),
    ],
)
def test_what_a_conversation_is_made_of(talk: Any, lines: list[str], asked: list[list[str]], shown: str) -> None:
    said, found = talk(*lines)
    assert [[message["content"] for message in one] for one in found] == asked
    assert shown in " ".join(said.split())


def test_help_tells_of_every_command_and_of_several_lines(talk: Any) -> None:
    shown, asked = talk("/help")
    assert asked == []
    for word in ("/help", "/clear", "/new", "/exit", "/quit", "Ctrl-D", "\\", '"""'):
        assert word in shown


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
