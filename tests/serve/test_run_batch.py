"""Batch files: every line has its result once, whatever went wrong and however often the run was stopped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strata.engine.process.messages import Delta
from strata.models.folder import BUILTIN_FOLDER
from strata.serve.batch_file import BatchFault, BatchResults, read_requests
from strata.serve.client import EngineGone
from strata.serve.run_batch import answer_all, engine_process, post
from strata.text.tokenizer import Tokenizer
from tests.serve.running import PATIENCE, descendants, is_alive, wait_for
from tests.serve.scripted import EOS, Scripted, Serve, delta

Answering = Callable[[], AbstractContextManager[Scripted]]


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "Hi"}})


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def script(tokenizer: Tokenizer) -> list[Sequence[Delta]]:
    ids = tokenizer.encode("It is 85.", add_special_tokens=False)
    return [[delta(0, ids)], [delta(0, [EOS], "stop")]]


@pytest.fixture
def answering(serve_script: Serve, script: list[Sequence[Delta]]) -> Answering:
    """A server whose model says `script`."""
    return partial(serve_script, script)


def run(served: Scripted, files: tuple[Path, Path], at_once: int = 3) -> BatchResults:
    app: Any = served.client.app
    with opened(files) as results:
        application, client = app._app, served.state.client  # behind the gate, as in a batch
        asyncio.run(answer_all(application, client, read_requests(files[0]), results, at_once, lambda: None))
    return results


def opened(files: tuple[Path, Path]) -> BatchResults:
    return BatchResults(files[1], read_requests(files[0]))


def results_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in file.read_text().splitlines()]


def test_every_line_gets_its_result(answering: Answering, files: tuple[Path, Path]) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    asked = [
        line("chat", "/v1/chat/completions", **chat),
        line("completion"),
        line("response", "/v1/responses", input="Hi"),
        line("wrong", bogus=1, prompt="Hi"),
        line("other model", prompt="Hi", model="gpt"),
    ]
    files[0].write_text("\n".join(asked) + "\n\n")
    with answering() as served:
        results = run(served, files)
    found = {result["custom_id"]: result for result in results_of(files[1])}
    assert (results.succeeded, results.failed, len(found)) == (3, 2, 5)
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "It is 85."
    assert found["completion"]["response"]["body"]["choices"][0]["text"] == "It is 85."
    assert found["response"]["response"]["body"]["output"][0]["content"][0]["text"] == "It is 85."
    assert [found[name]["response"]["status_code"] for name in ("chat", "wrong", "other model")] == [200, 400, 404]
    assert found["wrong"]["response"]["body"]["error"]["param"] == "bogus"
    for result in found.values():
        assert set(result) == {"id", "custom_id", "response", "error"}
        assert set(result["response"]) == {"status_code", "request_id", "body"}
        assert result["error"] is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("not json", "invalid_json"),
        ('{"custom_id": "a"', "invalid_json"),
        ("[" * 5000, "invalid_json"),
        ("\udcff", "invalid_json"),
        ("5", "invalid_request"),
        ("{}", "missing_custom_id"),
        ('{"custom_id": 5}', "missing_custom_id"),
        ('{"custom_id": "a", "method": "GET"}', "invalid_method"),
        ('{"custom_id": "a", "method": "POST", "url": "/metrics"}', "invalid_url"),
        ('{"custom_id": "a", "method": "POST", "url": ["/v1/completions"]}', "invalid_url"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "invalid_request"),
        (line("a", prompt="Hi", stream=True), "invalid_request"),
        (line("a")[:-1] + ', "priority": 1}', "invalid_request"),
        (line("first"), "duplicate_custom_id"),
    ],
)
def test_a_line_that_is_no_request_is_an_error_of_its_own(
    answering: Answering, files: tuple[Path, Path], text: str, code: str
) -> None:
    files[0].write_bytes("\n".join([line("first"), text, line("last")]).encode(errors="surrogateescape"))
    with answering() as served:
        run(served, files)
        results = run(served, files)  # nothing is told twice
    assert (results.succeeded, results.failed) == (2, 1)
    (fault,) = [result["error"] for result in results_of(files[1]) if result["error"]]
    assert (fault["code"], fault["line"]) == (code, 2)
    assert re.match(r"line 2(, column \d+)?: ", fault["message"])
    assert ("column" in fault["message"]) == (code == "invalid_json" and "[[" not in text)


def test_a_line_that_is_no_json_is_told_with_its_column(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_bytes(line("a").encode() + b'\n{"custom_id": "b",, }\n\n{"custom_id": "\xff"}\n' + line("a").encode())
    _, comma, byte, twice = read_requests(file)
    assert [one.message for one in (comma, byte, twice) if isinstance(one, BatchFault)] == [
        "line 2, column 19: not JSON: object keys must be strings",
        "line 4, column 16: not UTF-8: byte 0xff",
        "line 5: line 1 has the custom_id 'a'",
    ]


def test_a_run_that_was_cut_off_anywhere_is_completed(answering: Answering, files: tuple[Path, Path]) -> None:
    files[0].write_text("\n".join(line(str(number), bogus=number) for number in range(3)))
    with answering() as served:
        run(served, files, at_once=1)
        whole = files[1].read_bytes()
        for kept in range(0, len(whole) + 1, 31):
            files[1].write_bytes(whole[:kept])
            assert run(served, files, at_once=1).failed == 3
            assert [result["custom_id"] for result in results_of(files[1])] == ["0", "1", "2"]
            untouched = whole[:kept].rpartition(b"\n")[0]
            assert files[1].read_bytes().startswith(untouched)


def test_so_many_are_answered_at_once_and_no_more(serve_script: Serve, files: tuple[Path, Path]) -> None:
    files[0].write_text("\n".join(line(str(number)) for number in range(10)))
    now = most = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    with serve_script([]) as served, opened(files) as results:
        asyncio.run(answer_all(app, served.state.client, read_requests(files[0]), results, 4, lambda: None))
    assert results.succeeded == 10
    assert most == 4


def test_what_an_engine_took_with_it_is_left_for_the_next_run(
    serve_script: Serve, answering: Answering, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files[0].write_text("\n".join(line(str(number)) for number in range(5)))

    async def wait_dead() -> str:
        return "the engine process has ended"

    with serve_script([EngineGone("killed")]) as served:
        monkeypatch.setattr(served.engine, "alive", False)
        monkeypatch.setattr(served.engine, "wait_dead", wait_dead, raising=False)
        with pytest.raises(EngineGone, match="has ended"):
            run(served, files)
    assert files[1].read_text() == ""
    with answering() as served:
        assert run(served, files).succeeded == 5


def test_how_an_engine_was_killed_is_told() -> None:
    async def scenario() -> str:
        async with engine_process({"model": str(BUILTIN_FOLDER), "device": "cpu"}) as client:
            assert client.ready.pid is not None
            os.kill(client.ready.pid, signal.SIGKILL)
            return await asyncio.wait_for(client.wait_dead(), 60)

    assert asyncio.run(scenario()) == "the engine process was killed by SIGKILL (out of memory?)"


def test_a_fault_of_the_application_is_one_requests_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("secret")

    status, body = asyncio.run(post(app, "/v1/completions", b"{}"))
    assert status == 500
    assert json.loads(body)["error"]["code"] == "internal_error"
    assert b"secret" not in body


@pytest.mark.parametrize(
    "content", [b"my diary\n", b"my diary", b'{"custom_id": "a"}\n', b"[1]\n{}\n", b'{"custom_id": "a"}', b"\xff"]
)
def test_a_file_that_holds_no_results_is_left_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "out.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"out\.jsonl holds no results \(line 1"):
        BatchResults(file, [])
    assert file.read_bytes() == content


def test_a_folder_is_no_file_of_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no regular file"):
        BatchResults(tmp_path, [])


def test_one_run_at_a_time_writes_a_file_of_results(files: tuple[Path, Path]) -> None:
    files[0].write_text(line("a") + "\n")
    with opened(files) as first:
        with pytest.raises(ValueError, match=rf"another run writes {files[1]}: wait for its end"):
            opened(files)
        first.answer(next(iter(read_requests(files[0]))), 200, b"{}")  # type: ignore[arg-type]
    with opened(files) as second:  # what it left behind blocks nobody
        assert second.succeeded == 1


def test_a_run_that_was_killed_leaves_its_file_free(files: tuple[Path, Path]) -> None:
    files[0].write_text(line("a") + "\n")
    program = (
        "import pathlib, sys, time\n"
        "from strata.serve.batch_file import BatchResults, read_requests\n"
        "results = BatchResults(pathlib.Path(sys.argv[2]), read_requests(pathlib.Path(sys.argv[1])))\n"
        "print('open', flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, *map(str, files)], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == "open\n"
            with pytest.raises(ValueError, match="another run writes"):
                opened(files)
        finally:
            run.kill()
    with opened(files) as results:
        assert results.total == 1


def test_results_of_other_requests_are_refused_and_left_alone(answering: Answering, files: tuple[Path, Path]) -> None:
    files[0].write_text("\n".join(line(name) for name in ("mine", "theirs", "also theirs")))
    with answering() as served:
        run(served, files, at_once=1)
    content = files[1].read_bytes()
    files[0].write_text(line("mine") + "\n" + line("new"))
    with pytest.raises(ValueError, match=r"holds results of other requests \(2; the first has custom_id 'theirs'\)"):
        opened(files)
    assert files[1].read_bytes() == content


def test_only_what_was_asked_for_is_counted(answering: Answering, files: tuple[Path, Path]) -> None:
    files[0].write_text(line("a") + "\nnot json\n" + line("b"))
    with answering() as served:
        run(served, files)
        files[0].write_text(line("a") + "\n" + line("repaired") + "\n" + line("b"))
        results = run(served, files)
    assert (results.total, results.succeeded, results.failed) == (3, 3, 0)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What this process writes ends there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 10, 700])
def test_a_full_disk_is_one_line_and_what_was_written_stays_whole(
    serve_script: Serve, files: tuple[Path, Path], size: int
) -> None:
    files[0].write_text("\n".join(line(str(number), bogus=number) for number in range(9)))
    with serve_script([]) as served:
        with largest_file(size), pytest.raises(ValueError, match="the same command goes on") as refused:
            run(served, files)
        assert "\n" not in str(refused.value)
        whole = files[1].read_bytes()
        assert len(whole) <= size
        assert whole == b"" or whole.endswith(b"\n")
        assert run(served, files).failed == 9
    assert files[1].read_bytes().startswith(whole)
    assert sorted(result["custom_id"] for result in results_of(files[1])) == [str(number) for number in range(9)]


def run_command(*arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strata", "run-batch", *arguments], capture_output=True, text=True, timeout=PATIENCE
    )


def test_the_command_answers_and_goes_on(tmp_path: Path) -> None:
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    question = {"messages": [{"role": "user", "content": "What is 47 + 38?"}], "max_completion_tokens": 2}
    asked.write_text(line("chat", "/v1/chat/completions", **question) + "\n" + line("e", "/v1/embeddings", input="Hi"))
    result = run_command(asked, answered, "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert "2 succeeded, 0 failed" in result.stderr
    first = answered.read_text()
    assert [json.loads(one)["response"]["status_code"] for one in first.splitlines()] == [200, 200]
    with asked.open("a") as more:
        more.write("\nnot json")
    again = run_command(asked, answered, "--device", "cpu")
    assert again.returncode == 1
    assert re.match(re.escape(str(asked)) + r", line 3, column \d+: not JSON: ", again.stderr)
    assert answered.read_text().startswith(first)


def test_the_command_needs_two_files(tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_text(line("a"))
    same = run_command(asked, asked)
    (tmp_path / "out").touch()
    missing = run_command(tmp_path / "none", tmp_path / "out")
    assert (same.returncode, missing.returncode) == (1, 1)
    assert "holds the requests" in same.stderr
    assert "cannot be read" in missing.stderr
    assert "Traceback" not in missing.stderr
    assert asked.read_text() == line("a")


def test_what_the_engine_refuses_is_said_once(tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_text(line("a"))
    nowhere = run_command(asked, tmp_path / "out", "--model", "nowhere")
    too_long = run_command(asked, tmp_path / "out", "--device", "cpu", "--max-model-len", "100000")
    for refused, what in ((nowhere, "'nowhere' does not exist"), (too_long, "--max-model-len 100000 is over")):
        assert refused.returncode == 1
        assert refused.stderr.startswith("strata: error: ")
        assert what in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_a_run_that_is_told_to_stop_while_the_engine_loads_says_so(tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_text(line("a"))
    command = [sys.executable, "-m", "strata", "run-batch", asked, tmp_path / "out", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: descendants(process.pid))
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143
    assert output.splitlines()[-1].startswith("stopped: 0 of 1 request ")
    assert "Traceback" not in output


def test_a_run_that_is_told_to_stop_says_how_far_it_has_come(tmp_path: Path) -> None:
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    long = {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True}
    asked.write_text("not json\n" + "\n".join(line(str(one), **long) for one in range(200)))
    command = [sys.executable, "-m", "strata", "run-batch", asked, answered, "--device", "cpu", "--model", "builtin"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        wait_for(lambda: answered.exists() and answered.read_bytes())
        children = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, output = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    there = len(results_of(answered))
    last = output.splitlines()[-1]
    assert last == f"stopped: {there} of 201 requests have their result in {answered}; the same command goes on"
    assert "Traceback" not in output
    wait_for(lambda: not any(map(is_alive, children)))
