"""Runs of a list in their order, what is left out, ended or done before; measured loads and their predictions."""

from __future__ import annotations

import json
import runpy
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from benchmarks.plan.predicted_runs import by_kind, errors, figures, offline_runs, served_options, served_runs
from tests.benchmarks.conftest import runs as lives
from tests.benchmarks.conftest import wait_for

runs = import_module("benchmarks.figures.__main__")

ABOUT = {"commit": "a", "device": "none"}
ROOT = Path(__file__).resolve().parents[2]
LISTED = runs.read(runs.RUNS)


def run(name: str, code: str, seconds: float = 5.0, results: str = "") -> Any:
    return runs.Run(name, "some", f"python -c {shlex.quote(code)} {{save}}", seconds, "nothing", results)


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def test_all_run_in_order_and_a_failure_stops_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = "import sys; open(sys.argv[1], 'a').write('{}\\n'); print('said {}')"
    chosen = [
        run("first", write.format(1, 1), results="figures.jsonl"),
        run("second", "raise SystemExit(3)"),
        run("third", write.format(3, 3), results="figures.jsonl"),
    ]
    assert runs.perform_all(chosen, tmp_path, 60, ABOUT) == 1
    faults = {line["name"]: line["fault"] for line in lines(tmp_path)}
    assert list(faults.items()) == [("first", ""), ("second", "exit code 3"), ("third", "")]
    assert all(line["commit"] == "a" for line in lines(tmp_path))
    assert (tmp_path / "figures.jsonl").read_text() == "1\n3\n"
    assert [(tmp_path / f"logs/{name}.txt").read_text() for name in ("first", "third")] == ["said 1\n", "said 3\n"]
    assert "second: exit code 3" in capsys.readouterr().out


def test_what_failed_and_what_is_of_another_commit_runs_again(tmp_path: Path) -> None:
    chosen = [run("good", "pass"), run("bad", "raise SystemExit(1)")]
    runs.perform_all(chosen, tmp_path, 60, ABOUT)
    runs.perform_all(chosen, tmp_path, 60, ABOUT)
    assert [line["name"] for line in lines(tmp_path)] == ["good", "bad", "bad"]
    runs.perform_all(chosen, tmp_path, 60, ABOUT | {"commit": "b"})
    assert [line["name"] for line in lines(tmp_path)] == ["good", "bad", "bad", "good", "bad"]


def test_a_run_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('child', child.pid, flush=True); time.sleep(600)"
    )
    assert runs.perform_all([run("long", parent, seconds=2.0)], tmp_path, 60, ABOUT) == 1
    assert lines(tmp_path)[0]["fault"] == "not done after 4 s"
    child = int((tmp_path / "logs/long.txt").read_text().split()[1])
    wait_for(lambda: not lives(child))  # what was killed goes when it gets its turn


def test_an_interrupt_ends_what_is_under_way(tmp_path: Path) -> None:
    """At once, on every GPU: children have sessions of their own, which the terminal's signal does not reach."""
    program = (
        "from importlib import import_module; from pathlib import Path; "
        "runs = import_module('benchmarks.figures.__main__'); "
        "wait = 'python -c \"import os, time; print(os.getpid(), flush=True); time.sleep(600)\"'; "
        "chosen = [runs.Run(name, 'some', wait, 300.0, 'nothing') for name in 'abc']; "
        f"runs.perform_all(chosen, Path({str(tmp_path)!r}), 600, {{'commit': 'a'}}, ('0', '1'))"
    )
    told = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL)
    logs = [tmp_path / f"logs/{name}.txt" for name in "ab"]
    try:
        wait_for(lambda: all(log.exists() and log.read_text().strip() for log in logs))
        children = [int(log.read_text()) for log in logs]
        told.send_signal(signal.SIGINT)
        assert told.wait(timeout=60) != 0
    finally:
        told.kill()
        told.wait()
    wait_for(lambda: not any(map(lives, children)))
    assert not (tmp_path / "logs/c.txt").exists()


def test_what_the_limit_has_no_room_for_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.perform_all([run("long", "pass", seconds=100), run("short", "pass")], tmp_path, 60, ABOUT) == 1
    assert [line["name"] for line in lines(tmp_path)] == ["short"]
    assert "long: left out, takes 100 s of" in capsys.readouterr().out


# Says which GPUs it has, then waits until as many runs have begun as are to be under way together.
TOGETHER = (
    "import os, sys, time; from pathlib import Path; folder = Path(sys.argv[1]).parent; "
    "own = os.environ['CUDA_VISIBLE_DEVICES']; print(own); (folder / '{}.begun').touch(); end = time.time() + 20\n"
    "while len(list(folder.glob('*.begun'))) < {} and time.time() < end: time.sleep(0.01)\n"
    "sys.exit(time.time() >= end)"
)


def test_runs_with_gpus_of_their_own_go_on_at_once(tmp_path: Path) -> None:
    chosen = [replace(run(str(gpus), TOGETHER.format(gpus, 3), 30.0, "x"), gpus=gpus) for gpus in (2, 1, 3)]
    chosen.append(replace(run("last", TOGETHER.format("last", 3), 30.0, "x"), gpus=1))
    # Of four GPUs 2 and 1 take three, and the fourth goes to the last; 3 waits for them.
    assert runs.perform_all(chosen, tmp_path, 60, ABOUT, ("a", "b", "c", "d")) == 0
    had = {name: (tmp_path / f"logs/{name}.txt").read_text().strip() for name in ("2", "1", "last", "3")}
    assert (had["2"], had["1"], had["last"]) == ("a,b", "c", "d")
    assert len(set(had["3"].split(","))) == 3


def test_what_is_to_be_alone_has_nothing_beside_it(tmp_path: Path) -> None:
    look = (
        "import sys, time; from pathlib import Path; folder = Path(sys.argv[1]).parent; own = folder / '{}.running'; "
        "own.touch(); time.sleep(0.3); print(len(list(folder.glob('*.running')))); own.unlink()"
    )
    chosen = [replace(run(name, look.format(name), results="x"), alone=name == "b") for name in "abc"]
    assert runs.perform_all(chosen, tmp_path, 60, ABOUT, ("0", "1", "2")) == 0
    assert (tmp_path / "logs/b.txt").read_text().strip() == "1"


def test_more_gpus_than_there_are_leave_a_run_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs.perform_all([replace(run("wide", "pass"), gpus=2), run("one", "pass")], tmp_path, 60, ABOUT, "0") == 1
    assert [line["name"] for line in lines(tmp_path)] == ["one"]
    assert "wide: left out, takes 2 GPUs of 1" in capsys.readouterr().out


def test_an_unknown_topic_is_an_error() -> None:
    asked = [sys.executable, "-m", "benchmarks.figures", "precison"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown topic 'precison'; there are correctness, precision" in done.stderr


def test_names_are_told_apart() -> None:
    assert len({one.name for one in LISTED}) == len(LISTED)
    assert all("/" not in one.name for one in LISTED)  # their output is in files of these names
    assert all(("{save}" in one.command) == bool(one.results) for one in LISTED)


@cache
def told(module: str, commands: tuple[str, ...]) -> str:
    """What a program says of its options: in a fork, which has imported already what most of them need."""
    with NamedTemporaryFile("r") as said:
        process = get_context("fork").Process(target=_help, args=(module, commands, said.name))
        process.start()
        process.join()
        assert process.exitcode == 0, (module, commands)
        return said.read()


def _help(module: str, commands: tuple[str, ...], path: str) -> None:
    with Path(path).open("w") as sys.stdout:
        sys.argv = [module, *commands, "--help"]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("listed", LISTED, ids=lambda one: one.name)
def test_each_command_is_there_with_its_options(listed: object, tmp_path: Path) -> None:
    words = listed.arguments(tmp_path)  # type: ignore[attr-defined]
    if words[1] == str(Path("tools/gpu_tests.py")):
        names = [path.name for path in (ROOT / "tests/gpu").rglob("test_*.py")]
        assert all(any(word in name for name in names) for word in words[2:])
        return
    module, rest = words[2], words[3:]
    if module == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests/"))
        return
    commands = 0 if module != "strata" else 2 if rest[0] == "bench" else 1
    offered = told(module, (*rest[:commands],))
    assert [word for word in rest if word.startswith("--") and word.partition("=")[0] not in offered] == []


SERVED = {
    "engine": "strata", "model": "8B", "load": "20/s", "commit": "abc", "request_rate": 20.0, "seed": 3,
    "requests": 250, "max_concurrency": None, "data": "random prompts of 512 and answers of 128 tokens",
    "started": "2026-11-21T10", "seconds": 13.0, "ttft_ms": {"p50": 20.0}, "tpot_ms": {"p50": 5.0},
}  # fmt: skip


def test_the_newest_of_each_load_of_strata_counts(tmp_path: Path) -> None:
    newer, older, lacking = (tmp_path / name for name in ("newer", "older", "lacking"))
    lines = [SERVED | {"seconds": 14.0, "started": "2026-11-22T10"}, SERVED | {"engine": "vllm", "seconds": 1.0}]
    newer.write_text("".join(json.dumps(line) + "\n" for line in lines))
    older.write_text("".join(json.dumps(line) + "\n" for line in [SERVED, {"test": "T5"}]))
    (run,) = served_runs([newer, older, lacking], "h200")
    assert run["measured"] == {"seconds": 14.0, "ttft_p50": 20.0, "tpot_p50": 5.0}
    assert run["command"][0] == "8B"


def test_loads_of_several_gpus_and_of_packed_weights_are_simulated_as_such(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = [SERVED, SERVED | {"tensor_parallel_size": 2, "quantization": None}, SERVED | {"quantization": "fp8"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    alone, divided, packed = served_runs([file], "h200")
    assert divided["command"] == [*alone["command"], "--tensor-parallel-size", "2"]
    assert packed["command"] == [*alone["command"], "--quantization", "fp8"]
    assert [run["model"] for run in (alone, divided, packed)] == ["8B"] * 3
    assert [run["run"] for run in (alone, divided, packed)] == ["20/s", "20/s on 2 GPUs", "20/s in fp8"]


def test_seconds_of_offline_tests_are_of_the_whole_call(tmp_path: Path) -> None:
    file = tmp_path / "h200.jsonl"
    common = {"model": "8B", "dtype": "bf16", "commit": "abc"}
    tests = [("T2", 4.0), ("T4", 32768.0), ("T6", 1.0)]
    file.write_text("".join(json.dumps(common | {"test": test, "value": value}) + "\n" for test, value in tests))
    assert [run["measured"]["seconds"] for run in offline_runs(file, "h200")] == [4.0 * 512 / 1e3, 1.0]


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("random prompts of 512 and answers of 128 tokens", ["--input-len", "512", "--output-len", "128"]),
        (
            "shared-prefix prompts of 128 and answers of 64 tokens, 8 prefixes of 1024",
            ["--dataset", "shared-prefix", "--input-len", "128", "--output-len", "64", "--prefix-groups", "8",
             "--prefix-len", "1024"],
        ),
        (
            "lognormal prompts of 220 and answers of 190 tokens on average, each at most 2048",
            ["--dataset", "lognormal", "--input-len", "220", "--output-len", "190", "--longest", "2048"],
        ),
    ],
)  # fmt: skip
def test_a_load_is_made_anew_from_its_description(data: str, options: list[str]) -> None:
    found = served_options(SERVED | {"data": data, "max_concurrency": 256})
    common = ["--num-prompts", "250", "--request-rate", "20.0", "--seed", "3", "--max-concurrency", "256"]
    assert found == common + options


def test_other_data_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="poems"):
        served_options(SERVED | {"data": "poems"})


def test_errors_are_shares_of_what_was_measured() -> None:
    lines = [{"measured": {"seconds": 2.0}, "simulated": {"seconds": 1.0}}, {"measured": {}, "simulated": {}}]
    assert list(errors(lines, "seconds")) == [-0.5]
    assert figures({"seconds": 1.0, "ttft_ms": {"p50": 2.0}, "tpot_ms": None}) == {"seconds": 1.0, "ttft_p50": 2.0}


def test_loads_with_shared_prefixes_are_summed_up_alone() -> None:
    lines = [{"run": name, "shares": name == "cached"} for name in ("20/s", "cached", "T1")]
    assert by_kind(lines) == {"all others": [lines[0], lines[2]], "shared prefixes": [lines[1]]}
