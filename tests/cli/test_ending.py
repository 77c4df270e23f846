"""What a user sees when a command cannot go on."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strata.bench.run import Setup, engine
from strata.cli.bench import inference as bench
from strata.cli.ending import ending, explanation
from strata.cli.main import app
from strata.engine import ledger
from strata.engine.faults import EngineFault
from strata.models.folder import BUILTIN_FOLDER


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "/no/x"), "/no/x: No such file; check the path"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "f/x"), "f/x: Not a directory; .* must be a folder"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "x: Permission denied; .*permissions"),
        (OSError(errno.ENOSPC, "No space left", "x"), "x: No space left; free some space and run the same command"),
        (OSError(errno.ENOSPC, "No space left"), "No space left; free some space and run the same command"),
        (OSError(errno.EXDEV, "Cross-device link", "x", None, "y"), None),
        (ValueError("wrong"), "wrong"),
        (EngineFault("out of memory"), "out of memory"),
        (FileNotFoundError(errno.ENOENT, "No such file"), None),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), None),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), None),
        (RuntimeError("a mistake of ours"), None),
    ],
)
def test_what_a_user_can_mend_is_told_and_a_bug_keeps_its_traceback(
    error: Exception, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if said is None:
        assert explanation(error) is None
        with pytest.raises(type(error)), ending():
            raise error
        return
    with pytest.raises(SystemExit) as left, ending():
        raise error
    assert left.value.code == 1
    told = capsys.readouterr().err
    assert re.match(f"strata: error: {said}", told)
    assert told.count("\n") == 1


def test_the_handler_of_interrupts_is_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as left, ending():
        raise KeyboardInterrupt
    assert left.value.code == 130
    assert signal.getsignal(signal.SIGINT) is before


SLOW_IMPORT = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException:
    print("swallowed", flush=True)
"""
# A lost interrupt is one after which the program runs on.
PROGRAM = """
import subprocess, sys, time
from strata.cli.ending import ending
with ending():
    if sys.argv[1] == "import":
        import slow_import
    elif sys.argv[1] == "child":
        code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        print("running", flush=True)
        time.sleep(60)
print("ran on", flush=True)
"""


def start(where: str, folder: Path) -> subprocess.Popen[str]:
    folder.joinpath("slow_import.py").write_text(SLOW_IMPORT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()])}
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, where], env=environment, **settings)


@pytest.mark.parametrize(("where", "code"), [("import", -signal.SIGINT), ("running", 130)])
def test_an_interrupt_is_heard_also_while_a_module_is_imported(where: str, code: int, tmp_path: Path) -> None:
    with start(where, tmp_path) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() in ("importing\n", "running\n")
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code
    assert (said, errors) == ("", "")


def test_a_child_is_not_deaf(tmp_path: Path) -> None:
    with start("child", tmp_path) as process:
        said, _ = process.communicate(timeout=60)
    assert said == "True\nran on\n"


def test_a_file_that_cannot_be_written_is_found_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "_run", lambda *_, **__: pytest.fail("measured"))
    for command in ("latency", "serve", "gaps T1", "train"):
        arguments = ["bench", *command.split(), "--save", str(tmp_path / "missing" / "x.jsonl")]
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, FileNotFoundError), command


def test_too_little_memory_is_told_without_options_that_the_command_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "available_memory", lambda _: (2**25, 2**25))
    setup = Setup("builtin", "dummy", "bfloat16", "cpu", deterministic=False)
    with pytest.raises(ValueError, match="take a smaller model, a --dtype of fewer bytes, or a machine") as refused:
        engine(setup.llm_options())
    assert "gpu_memory_utilization" not in str(refused.value)
    assert "weights" in str(refused.value)


def test_the_built_in_model_can_be_measured_by_its_name() -> None:
    setup = Setup("builtin", None, "bfloat16", "cpu", deterministic=False)
    assert setup.llm_options()["model"] == str(BUILTIN_FOLDER)
    assert setup.llm_options()["load_format"] == "auto"


def test_the_start_up_ends_with_its_process(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "builtin", "--device", "cpu", "--dtype", "fp3", "--repeat", "1"]
    result = CliRunner().invoke(app, ["bench", "startup", *options])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    said = capfd.readouterr().err
    assert said.startswith("strata: error: dtype 'fp3'")
    assert said.count("\n") == 1


def test_graph_takes_the_built_in_model_by_its_name() -> None:
    result = CliRunner().invoke(app, ["graph", "builtin", "--json"])
    assert result.exit_code == 0
