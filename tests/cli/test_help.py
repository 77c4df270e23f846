"""`--help`, `--version`, words that are nearly a command; the threads of a command; `strata probe`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import strata
from strata.cli import main
from strata.cli.main import app, set_waiting
from strata.cli.options import EngineOptions
from strata.cli.probe import probe
from strata.engine.engine_config import EngineConfig
from strata.hardware.probe import report, run
from strata.hardware.probe.ceiling import Ceiling
from strata.hardware.probe.cpu import CpuSizes, probe_items
from strata.hardware.probe.report import kept
from strata.models.shapes import SHAPES
from tests.hardware.probe.test_device import REPORT

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
    ("typed", "said"),
    [
        ("srve", "Did you mean 'serve'?"),
        ("run_batch", "Did you mean 'run-batch'?"),
        ("benchmark", "Did you mean 'bench'?"),
        ("bench thruput", "Did you mean 'throughput'?"),
        ("xyzzy", "No such command 'xyzzy'."),
    ],
)
def test_a_near_miss_is_answered_with_the_command_that_was_meant(typed: str, said: str) -> None:
    result = RUNNER.invoke(app, typed.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert ("Did you mean" in result.stderr) == ("Did you mean" in said)


@pytest.mark.parametrize("command", [*commands(), ("data", "files"), ("data", "exercises")], ids=" ".join)
def test_names_of_options_are_whole_on_a_narrow_terminal_and_there_is_an_example(command: tuple[str, ...]) -> None:
    text = help_of(command)
    cut = [one.opts[0] for one in options(command) if not re.search(rf"{one.opts[0]}\b(?!…)", text)]
    assert cut == []
    assert "…" not in text
    assert "--install-completion" not in text, "only strata itself sets up the shell"
    assert re.search(f"Examples?(, [^:]*)?: strata {command[0]} ", re.sub(r"[│\s]+", " ", text))


@pytest.mark.parametrize(
    ("title", "command", "names"),
    [
        *(
            ("Engine", command, "dtype device deterministic")
            for command in ("serve", "generate", "chat", "run-batch", "bench throughput", "bench gaps")
        ),
        *(("Sampling", command, "temperature top-p top-k seed max-tokens") for command in ("generate", "chat")),
    ],
)
def test_options_of_one_thing_stand_together(title: str, command: str, names: str) -> None:
    found = panels(help_of(tuple(command.split()), columns=200))
    for name in names.split():
        assert [one for one, rows in found.items() if re.search(rf"--{name}\b", rows)] == [title]


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ("", "--install-completion"),
        ("serve", "--no-enable-prefix-caching"),  # how a flag that is on is turned off
        ("serve, warm, graph, generate, chat, run-batch, bench latency", "org/model"),
        ("graph, serve, bench latency", "all, exact, none, names"),  # see tests/graph/test_passes.py
        ("graph, serve, bench latency", "-name"),
        ("graph, serve, bench latency", "+name"),
        ("graph, warm, simulate, plan, train", "--hardware"),
        ("plan, graph, simulate, warm", ", ".join(SHAPES)),
    ],
)
def test_what_help_says(commands: str, said: str) -> None:
    for command in commands.split(", "):
        text = re.sub(r"[│\s]+", " ", help_of(tuple(command.split())))
        assert said in text
        assert not (said == "--hardware" and re.search(r"--device\b", text)), "it is asked for by one name"


def test_options_of_the_engine_are_fields_of_its_config_with_the_same_defaults() -> None:
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    of_commands = {"tokenizer", "data_parallel_size", "step_target_ms"}
    for name in get_type_hints(EngineOptions).keys() - of_commands:
        assert getattr(EngineOptions, name) == defaults[name] or name == "tpot_target_ms", name  # that is a server's


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


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_measures_strata_itself_is_of_its_repository(tmp_path: Path, is_alone: bool) -> None:
    package = Path(strata.__file__).parent
    root = tmp_path if is_alone else package.parent
    if is_alone:
        (tmp_path / "strata").symlink_to(package)
    command = [sys.executable, "-m", "strata", "bench", "--help"]
    said = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, check=True
    )
    assert "throughput" in said.stdout
    names = ("faults", "kernels", "parallel", "predictions", "train")
    assert [f"│ {name} " in said.stdout for name in names] == [not is_alone] * 5


BRIEFLY, AT_ONCE = {"GOMP_SPINCOUNT": "10000"}, {"OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generate", BRIEFLY),
        ("serve", BRIEFLY),
        ("", BRIEFLY),
        ("explain T1", BRIEFLY),
        ("train run.toml", AT_ONCE),
        ("explain --run run.toml", AT_ONCE),
        ("explain --run=run.toml", AT_ONCE),
    ],
)
def test_threads_spin_briefly_and_those_of_training_not_at_all(arguments: str, said: dict[str, str]) -> None:
    found: dict[str, str] = {}
    set_waiting(arguments.split(), found)
    assert found == said


def test_what_a_user_says_of_them_stands() -> None:
    for chosen in ({"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}):
        found = dict(chosen)
        set_waiting(["serve"], found)
        assert found == chosen


def test_it_is_said_before_the_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str] | None] = []
    monkeypatch.setattr(sys, "argv", ["strata", "train", "run.toml"])
    monkeypatch.setattr(main, "set_waiting", seen.append)
    monkeypatch.setattr(main, "app", lambda: seen.append(None))
    main.main()
    assert seen == [["train", "run.toml"], None]


@pytest.mark.parametrize("arguments", [["train", "nowhere.toml"], ["explain", "--run", "nowhere.toml"]])
def test_commands_leave_it(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the process starts later would be told what a command sets."""
    for name in AT_ONCE | BRIEFLY:
        monkeypatch.delenv(name, raising=False)
    assert CliRunner().invoke(main.app, arguments).exit_code != 0
    assert not os.environ.keys() & (AT_ONCE | BRIEFLY)


SMALL = CpuSizes(copied=1 << 20, squares=(32,), rows=(1,), width=64, attended=32, call=0.01, held=0.05)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(run.cpu, "probe_items", partial(probe_items, sizes=SMALL))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "strata" / "probe"


def test_json_is_what_is_kept(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe("cpu", 60, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    (file,) = small.iterdir()
    assert json.loads(file.read_text()) == printed
    assert kept(file).product == printed["product"]
    assert {one["quantity"] for one in printed["ceilings"]} >= {"copy", "read", "product", "attention"}
    assert printed["gpus"] == []


def test_a_probe_is_a_table(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe("cpu", 60, as_json=False)
    printed = capsys.readouterr().out
    assert "32x32x32" in printed
    assert "FLOP/s" in printed
    assert "kept in" in printed


def test_a_table_is_whole_on_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the largest operands, the longest names and a device whose figures are promised."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(report, "keep", lambda *_: None)
    found = (
        Ceiling("copy", 4.2e12, 1e-3, shape=(1 << 30,)),
        Ceiling("product", 12.34e12, 1e-3, "bfloat16", (4096, 28672, 4096)),
        Ceiling("product, sustained", 701.5e12, 1e-3, "bfloat16", (8192,) * 3, 128),
        Ceiling("attention", 600.4e12, 1e-3, "bfloat16", (16, 32, 1024, 128), algorithm="cudnn_attention"),
        Ceiling("host to device", 52e9, 1e-3, shape=(256 << 20,)),
        Ceiling("kernel in a graph", 1.234e-6, 1.234e-6),
        Ceiling("reduce_scatter", 123.4e-6, 1e-3, "bfloat16", (128 << 20,), 8, "one shot and norm"),
    )
    monkeypatch.setattr(run, "probe", lambda *_: replace(REPORT, ceilings=found))
    probe("cpu", 60, as_json=False)
    printed = capsys.readouterr().out
    assert "\u2026" not in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80  # behind them the path of the file
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert rows[1:-3] == [
        "what dtype shape by reached promised unit share",
        "copy - 1 GiB 1 4.2 4.8 TB/s 88%",
        "product bfloat16 4096x28672x4096 1 12.34 989.4 TFLOP/s 1%",
        "product, sustained bfloat16 8192x8192x8192 128 701.5 989.4 TFLOP/s 71%",
        "attention bfloat16 16x32x1024x128 cudnn 600.4 989.4 TFLOP/s 61%",
        "host to device - 256 MiB 1 52 64 GB/s 81%",
        "what size by us",
        "kernel in a graph 1 1.234",
        "reduce_scatter 128 MiB 8 one shot and norm 123.4",
    ]


def test_a_cache_that_takes_no_files_is_a_warning(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small.parent.write_text("a file where the folder should be")
    probe("cpu", 60, as_json=True)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["ceilings"]
    assert captured.err.startswith("strata: warning: not kept: ")


def test_a_short_probe_does_not_replace_a_longer_one(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it had no time for would be lost; without an earlier one, it is kept."""
    monkeypatch.setattr(run, "probe", lambda *_: short)
    whole = (Ceiling("copy", 1e10, 1.0, shape=(9,)), Ceiling("product", 1e11, 1.0, "bfloat16", (9, 9, 9)))
    short = replace(REPORT, gpus=(), ceilings=whole[:1], missing={"products in bfloat16": "the time was over"})
    probe("cpu", 1, as_json=False)
    (file,) = small.iterdir()
    assert kept(file) == short
    longer = replace(REPORT, gpus=(), ceilings=whole, missing={})
    report.keep(longer, file)
    capsys.readouterr()
    probe("cpu", 1, as_json=False)
    captured = capsys.readouterr()
    assert kept(file) == longer
    assert captured.err == (
        f"strata: warning: not kept: {file} has product in bfloat16 too; give more --seconds, or remove it\n"
    )
    assert "kept in" not in captured.out
    file.write_text("{")
    probe("cpu", 1, as_json=False)
    assert kept(file) == short


def test_bad_input_of_a_probe() -> None:
    with pytest.raises(ValueError, match="'tpu' is unknown; give auto, cpu or cuda"):
        probe("tpu", 60, as_json=False)
