"""The commands as a person runs them, on the built-in model."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.cli import main
from strata.cli.main import app
from strata.engine.faults import EngineFault

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
    options = ["--model", str(broken), "--device", "cpu", "--max-tokens", "4", "--temperature", "0"]
    result = RUNNER.invoke(app, ["generate", "fox", "z", "--raw", "--json", *options])
    assert result.exit_code == 1
    sound, lost = (json.loads(line) for line in result.stdout.splitlines())
    assert sound["error"] is None
    assert sound["text"]
    assert (lost["text"], lost["finish_reason"]) == ("", "error")
    assert "NaN" in lost["error"]
    assert f"strata: error: 'z': {lost['error']}" in result.stderr


def test_chat_goes_on_after_a_reply_that_failed(broken: Path) -> None:
    options = ["--model", str(broken), "--device", "cpu", "--max-tokens", "4", "--temperature", "0"]
    result = RUNNER.invoke(app, ["chat", *options], input="z\nfox\n\n")
    assert result.exit_code == 0
    assert result.output.count("the logits hold NaN") == 1


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


@pytest.mark.parametrize(
    "command", ["generate", "chat", "graph", "train", "bench", "bench throughput", "bench startup"]
)
def test_help_has_an_example(command: str) -> None:
    result = RUNNER.invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert re.search(f"Example.*: strata {command} ", " ".join(result.output.split()))


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
