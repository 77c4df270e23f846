"""What the README and the pages show works as it stands."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

from strata.cli import serve as serve_cli
from strata.cli.main import app
from strata.engine.ahead import ahead
from strata.engine.engine_config import EngineConfig
from strata.hardware.probe import cpu
from strata.models.folder import BUILTIN_FOLDER
from strata.plan.search import search, step_table
from tests.cli.test_help import SMALL

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
NEEDS_GPU = "needs a GPU, and this machine has none"

# What a line has beside it here, so that it takes little time: by the words that it begins with.
SMALLER = {
    "strata generate": "--max-tokens 8",
    "strata plan 70B": "--gpus 2",
    "strata simulate": "--num-prompts 20",
    "strata quantize": "--samples 2 --length 64",
    "strata prune": "--samples 2 --length 64",
    "strata eval": "--passages 2 --task-examples 1",
    "strata probe": "--seconds 1",
    "strata data": "--workers 1",
    "strata train examples/sft.toml": "--run.steps 2 --run.checkpoint_every 2 --schedule.warmup 1 --schedule.decay 1",
}


def lines_of(heading: str) -> list[str]:
    """Of the block of commands under a heading, without remarks."""
    (block,) = re.findall(rf"^## {heading}\n+```\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+#.*", "", line) for line in block.splitlines()]


def test_the_python_example_answers_85(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "Answer: 85" in capsys.readouterr().out


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a machine without one; searches, probes and compilations have little to do, and servers are not started."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    items = cpu.probe_items
    monkeypatch.setattr(cpu, "probe_items", lambda summaries, *_: items(summaries, SMALL))
    for module, name, few in (
        (step_table, "_ALONE", (1, 64)),
        (step_table, "_BESIDE", (0, 64)),
        (step_table, "_PROMPTS", (256, 8192)),
        (search, "SEQUENCES", (16, 64)),
        (search, "BUDGETS", (8192,)),
        (search, "IN_FEWER_BITS", search.IN_FEWER_BITS[:1]),
    ):
        monkeypatch.setattr(module, name, few)

    class Compiled:
        def progress(self) -> Iterator[ahead.Progress]:
            yield ahead.Progress(3, 3, 3, (), ended=True)

    @contextmanager
    def compiling(asked: EngineConfig, limits: Any) -> Iterator[Compiled]:
        yield Compiled()

    def launch(job: Any, engine: dict[str, Any], *others: Any) -> int:
        EngineConfig.from_options(engine["model"], {name: value for name, value in engine.items() if name != "model"})
        return 0

    monkeypatch.setattr(ahead, "compiling", compiling)
    monkeypatch.setattr(serve_cli, "launch", launch)


def ran(line: str) -> Result:
    """A line of the README in this process, in the folder that it is run in."""
    words = shlex.split(line)
    for start, more in SMALLER.items():
        if line.startswith(start):
            words += shlex.split(more)
    return CliRunner().invoke(app, words[1:], input="/exit\n")


@pytest.mark.usefixtures("no_gpu")
def test_training_is_what_the_readme_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    script, *lines = lines_of("Train")
    monkeypatch.setattr(sys, "argv", script.split()[1:])
    runpy.run_path(sys.argv[0], run_name="__main__")
    (explained,) = (line for line in lines_of("From the command line") if "runs/sft" in line)
    for line in (*lines, explained):
        result = ran(line)
        assert result.exit_code == 0, f"{line}: {result.output} {result.exception}"
    assert (tmp_path / "runs" / "sft" / "model" / "model.safetensors").exists()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("line", [line for line in lines_of("From the command line") if "sft" not in line])
def test_a_line_runs_on_a_cpu_or_says_that_it_needs_a_gpu(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.txt").write_text("What is 3 + 4? Answer: 7. " * 9)
    stands = {r"path/to/\w+": str(BUILTIN_FOLDER), "FILES": "chats.txt", r"\b(DIR|FOLDER)\b": "written"}
    for name, meant in stands.items():
        line = re.sub(name, meant, line)
    result = ran(line)
    if isinstance(result.exception, ValueError):
        assert NEEDS_GPU in result.output + str(result.exception), result.exception
        assert not (tmp_path / "runs").exists()
    else:
        assert result.exit_code == 0, f"{result.output} {result.exception!r}"
        assert (tmp_path / "written").exists() == ("written" in line)


@cache
def command_of(path: tuple[str, ...]) -> Any:
    return command_of(path[:-1]).commands[path[-1]] if path else get_command(app)


def options_of(path: tuple[str, ...]) -> set[str]:
    """Of a command, without old names; of `strata data`, which is short for it, those of `strata data files`."""
    shown = (one for one in command_of(path).params if not getattr(one, "hidden", False))
    own = {name for one in shown for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    return own | (options_of(("data", "files")) if path == ("data",) else set())


def commands_shown() -> Iterator[tuple[str, str]]:
    """Name of the page, and what stands behind `strata`, in blocks and in lines."""
    for page in PAGES:
        text = page.read_text()
        blocks = [line for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
        inline = re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        for line in (*blocks, *(" ".join(one.split()) for one in inline)):
            for command in re.findall(r"\bstrata ([a-z][^#|;]*)", line):
                yield page.name, command


def test_options_that_pages_show_are_options_of_their_commands() -> None:
    wrong = []
    for page, shown in commands_shown():
        words = shown.replace("[", " ").replace("]", " ").split()
        path: tuple[str, ...] = ()
        while words and words[0] in getattr(command_of(path), "commands", ()):
            path = (*path, words.pop(0))
        known = options_of(path)
        # Values of a training run's file have a point in their names.
        named = [re.split(r"[=,:)]", word.strip("."))[0] for word in words if word.startswith("--")]
        wrong += [f"{page}: {shown}: {name}" for name in named if name not in known and "." not in name]
    assert wrong == []
