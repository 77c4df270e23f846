"""`--help`, `--version`, and what is said of a word that is nearly a command."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import strata
from strata.cli.main import app
from strata.models.shapes import SHAPES

RUNNER = CliRunner()


def commands() -> list[tuple[str, ...]]:
    """Every command, those of groups included."""
    found = []
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        found.append((name,))
        found += [(name, inner) for inner in getattr(command, "commands", ())]
    return found


def options(command: tuple[str, ...]) -> list[Any]:
    found: Any = get_command(app)
    for name in command:
        found = found.commands[name]
    return [one for one in found.params if one.param_type_name == "option" and not one.hidden]


def panels(text: str) -> dict[str, str]:
    """What stands in each frame of a help text, by its title."""
    found = re.findall(r"╭─ (\w[\w ]*) ─+╮\n(.*?)╰─", text, re.DOTALL)
    return dict(found)


def help_of(command: tuple[str, ...], columns: int = 80) -> str:
    result = RUNNER.invoke(app, [*command, "--help"], env={"COLUMNS": str(columns), "TERM": "dumb"})
    assert result.exit_code == 0
    return result.output


def test_version() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"strata {strata.__version__}\n")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [(["srve"], "serve"), (["run_batch"], "run-batch"), (["benchmark"], "bench"), (["bench", "thruput"], "throughput")],
)
def test_a_near_miss_is_answered_with_the_command_that_was_meant(typed: list[str], meant: str) -> None:
    result = RUNNER.invoke(app, typed)
    assert result.exit_code == 2
    assert f"Did you mean '{meant}'?" in result.stderr


def test_what_is_near_nothing_gets_no_suggestion() -> None:
    result = RUNNER.invoke(app, ["xyzzy"])
    assert result.exit_code == 2
    assert "No such command 'xyzzy'." in result.stderr


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_names_of_options_are_whole_on_a_narrow_terminal(command: tuple[str, ...]) -> None:
    text = help_of(command)
    cut = [one.opts[0] for one in options(command) if not re.search(rf"{one.opts[0]}\b(?!…)", text)]
    assert cut == []
    assert "…" not in text


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "run-batch", "bench throughput", "bench gaps"])
def test_options_of_the_engine_stand_together(command: str) -> None:
    found = panels(help_of(tuple(command.split()), columns=200))
    for option in ("--dtype", "--device", "--deterministic"):
        assert [title for title, rows in found.items() if re.search(rf"{option}\b", rows)] == ["Engine"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_options_of_sampling_stand_together(command: str) -> None:
    found = panels(help_of((command,)))
    for option in ("--temperature", "--top-p", "--top-k", "--seed", "--max-tokens"):
        assert [title for title, rows in found.items() if re.search(rf"{option}\b", rows)] == ["Sampling"]


def test_a_flag_that_is_on_says_how_to_turn_it_off() -> None:
    assert "--no-enable-prefix-caching" in help_of(("serve",))


def test_only_strata_itself_sets_up_the_shell() -> None:
    assert "--install-completion" in help_of(())
    assert [command for command in commands() if "--install-completion" in help_of(command)] == []


@pytest.mark.parametrize("command", ["serve", "warm", "graph", "generate", "chat", "run-batch", "bench latency"])
def test_a_model_may_be_a_download_of_the_hub(command: str) -> None:
    assert "org/model" in help_of(tuple(command.split()))


@pytest.mark.parametrize("command", [("graph",), ("serve",), ("bench", "latency")])
def test_the_forms_of_passes_are_those_that_are_taken(command: tuple[str, ...]) -> None:
    """See tests/graph/test_passes.py."""
    (option,) = (one for one in options(command) if one.opts[0] == "--passes")
    assert "all, exact, none, names" in option.help
    assert "-name" in option.help
    assert "+name" in option.help


def test_a_step_takes_no_less_than_no_time() -> None:
    result = RUNNER.invoke(app, ["serve", "--tpot-target-ms", "-1"])
    assert result.exit_code == 2
    assert "greater than or equal to 0" in re.sub(r"[\s│]+", " ", result.stderr)


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (["graph", "8B", "--device", "h100"], "--hardware h100"),
        (["warm", "8B", "--device", "h100"], "--hardware h100"),
        (["simulate", "8B", "--device", "h100"], "--hardware h100"),
        (["simulate", "8B", "--step-target-ms", "5"], "--tpot-target-ms 5"),
        (["serve", "--step-target-ms", "5"], "--tpot-target-ms 5"),
        (["train", "examples/8b.toml", "--estimate", "h100"], "--estimate --hardware h100"),
    ],
)
def test_who_gives_the_old_name_of_an_option_is_told_the_new_one(words: list[str], new: str) -> None:
    result = RUNNER.invoke(app, words)
    assert isinstance(result.exception, ValueError), result.output
    assert str(result.exception).endswith(f"give {new}")


def test_an_old_name_in_the_environment_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_STEP_TARGET_MS", "5")
    assert "--tpot-target-ms 5" in str(RUNNER.invoke(app, ["serve"]).exception)


@pytest.mark.parametrize("command", ["graph", "warm", "simulate", "plan", "train"])
def test_a_device_of_the_database_is_asked_for_by_one_name(command: str) -> None:
    text = help_of((command,))
    assert "--hardware" in text
    assert not re.search(r"--device\b", text)


@pytest.mark.parametrize("command", ["plan", "graph", "simulate", "warm"])
def test_all_shapes_are_named(command: str) -> None:
    text = re.sub(r"[│\s]+", " ", help_of((command,)))
    assert ", ".join(SHAPES) in text


def test_the_listing_comes_without_torch() -> None:
    """Which takes two seconds to load, and whoever asks what there is runs nothing."""
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from strata.cli.main import app\n"
        "assert 'simulate' in CliRunner().invoke(app, ['--help']).output\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
