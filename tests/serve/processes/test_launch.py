"""A server's life, from its command line to its last signal, each time with real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.main import get_command

from strata.cli.serve import command
from strata.engine.engine_config import EngineConfig
from strata.serve.processes.launch import bind, greeting
from strata.serve.processes.worker import ApiJob, listen
from strata.serve.settings import ServeSettings
from tests.serve.conftest import BUILTIN
from tests.serve.running import (
    PATIENCE,
    Running,
    command_line,
    descendants,
    is_alive,
    refusal,
    running,
    serve,
    wait_for,
)


def assert_nothing_is_left(server: Running, children: list[int]) -> None:
    wait_for(lambda: not any(map(is_alive, [server.pid, *children])))
    assert not server.folder.exists()


# ---- the command line ----


@pytest.fixture
def port() -> Iterator[str]:
    """One that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield str(other.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--port", "PORT"), "strata: error: 127.0.0.1:PORT .*--port"),
        (("--port", "0", "--allowed-origins", "*"), r"strata: error: .*--allowed-origins \*"),
        (("--port", "0", "--max-model-len", "5000"), "strata: error: .*--max-model-len 5000"),
        (("--port", "FREE", "--metrics-port", "FREE"), "strata: error: 127.0.0.1:FREE .*choose another --metrics-port"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], what: str, port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = str(other.getsockname()[1])
    told = [one.replace("PORT", port).replace("FREE", free) for one in (*arguments, what)]
    status, output, _ = refusal(*told[:-1])
    assert status == 1
    assert re.match(told[-1], output)
    assert output.count("\n") == 1


def test_a_port_that_another_process_took_while_the_model_loaded_is_named() -> None:
    """Two that start at once both get the address; the first that listens has it."""
    with bind("127.0.0.1", 0) as one, bind("127.0.0.1", one.getsockname()[1]) as other:
        listen(one)
        with pytest.raises(ValueError, match=rf"^127\.0\.0\.1:{one.getsockname()[1]} [^\n]*another port$"):
            listen(other)


def test_a_key_on_the_command_line_is_refused_and_not_repeated() -> None:
    status, output, _ = refusal("--api-key", "sk-secret")
    assert status == 2
    assert "--api-key-file" in output
    assert "sk-secret" not in output


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what users may name by mistake, which is the current one."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "no tokenizer").mkdir()
    (tmp_path / "no tokenizer" / "config.json").write_text("{}")
    (tmp_path / "bad.jinja").write_text("{% if %}")
    (tmp_path / "latin.jinja").write_bytes(b"one\nenl\xe9ve")
    (tmp_path / "empty").touch(0o600)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("nowhere",), "model folder 'nowhere' does not exist"),
        (("bare",), "model folder 'bare' has no config.json"),
        (("bad.jinja",), "model folder 'bad.jinja' is a file"),
        (("0.6B",), "'0.6B' is a shape"),
        (("no tokenizer",), "no tokenizer/tokenizer.json.*--tokenizer FOLDER"),
        (("0.6B", "--load-format", "dummy"), "shape '0.6B' has no tokenizer.*--tokenizer FOLDER"),
        (("--tokenizer", "bare"), "bare/tokenizer.json.*--tokenizer FOLDER"),
        (("--tokenizer", "nowhere"), "nowhere/tokenizer.json.*--tokenizer FOLDER"),
        (("--chat-template", "bad.jinja"), "bad.jinja, line 1: "),
        (("--chat-template", "latin.jinja"), "latin.jinja, line 2, column 4: not UTF-8: byte 0xe9"),
        (("some-org/model",), "'some-org/model' is no folder here .*`hf download some-org/model`"),
        (("--chat-template", "bare"), "--chat-template bare cannot be read"),
        (("--api-key-file", "empty"), "empty holds no API key"),
        (("--api-key-file", "/nowhere"), "/nowhere cannot be read"),
        (("/nowhere",), "model folder '/nowhere' does not exist"),
        (("--served-model-name", ""), "--served-model-name is empty"),
        (("--otlp-traces-endpoint", "collector:4318"), "--otlp-traces-endpoint collector:4318: give a URL"),
    ],
)
def test_what_is_given_by_mistake_is_named_before_anything_starts(
    given: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], what: str
) -> None:
    monkeypatch.setattr("strata.cli.serve.launch", lambda asked, engine, keys: 0)
    with pytest.raises(ValueError, match=what) as refused:
        get_command(command).main([*arguments], standalone_mode=False)
    assert "\n" not in str(refused.value)


def test_an_open_address_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.cli.serve.launch", lambda asked, engine, keys: 0)
    monkeypatch.setenv("STRATA_HOST", "0.0.0.0")
    with pytest.raises(ValueError, match=r"^--host 0\.0\.0\.0.*STRATA_API_KEY") as refused:
        get_command(command).main([], standalone_mode=False, **get_command(command).context_settings)
    assert "\n" not in str(refused.value)


def test_the_built_in_model_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("strata.cli.serve.launch", lambda job, engine, keys: asked.append((job, engine)) or 0)
    for arguments in ([], ["builtin"]):
        with pytest.raises(SystemExit):
            get_command(command).main(arguments, standalone_mode=False)
    assert asked[0] == asked[1]


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("192.0.2.1", r"^--host 192\.0\.2\.1 is no address of this machine(?!.*--port)"),
        ("not a host", r"^--host not a host cannot be used: [^\n]+$"),
    ],
)
def test_a_wrong_host_is_named_and_no_port(host: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bind(host, 0)


def test_memory_that_is_not_there_is_told_with_the_remedy_and_the_ledger() -> None:
    status, output, seconds = refusal("--port", "0", "--num-pages", "1000000000")
    assert status == 1
    error, *ledger = output.splitlines()
    assert error.startswith("strata: error: 1,000,000,000 KV pages do not fit")
    assert "ask for fewer" in error
    assert any("KV pages" in line for line in ledger)
    assert seconds < 30  # of a processor; a slow one takes half of them to import torch twice


def test_every_setting_has_an_option_and_every_option_a_variable() -> None:
    parameters = {parameter.name: parameter for parameter in get_command(command).params}
    names = {field.name for field in (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServeSettings))}
    renamed = {
        "served_model_names": "served_model_name",
        "tool_format": "tool_call_parser",
        "skip_tokenizer_init": "tokenizer",
        "body_limit": None,  # a constant, for tests to change
        "executor": None,  # for comparison alone: an option of strata bench
        "sparse_prefill_block": None,  # smaller ones are for measurements with short prompts
    }
    assert {renamed.get(name, name) for name in names} - {None} <= set(parameters)
    context = get_command(command).make_context("serve", [], **get_command(command).context_settings)
    assert context.auto_envvar_prefix == "STRATA"


# ---- one server, asked by several tests ----


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running("--allowed-hosts", "my.box") as started:
        yield started


def test_the_curl_line_of_the_greeting_gets_an_answer(server: Running) -> None:
    words = shlex.split(next(line for line in server.lines if line.startswith("curl ")))
    header, _, value = words[words.index("-H") + 1].partition(": ")
    answer = httpx.post(words[1], content=words[words.index("-d") + 1], headers={header: value}).json()
    assert "Answer: 85" in answer["choices"][0]["message"]["content"]


def test_a_model_without_a_chat_template_is_greeted_with_a_completion(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((BUILTIN / "tokenizer.json").read_text())
    settings = ServeSettings(str(tmp_path), ("base",))
    told = greeting(ApiJob(settings, [], str(tmp_path)), ("127.0.0.1", 8000), 1.0)
    words = shlex.split(told.splitlines()[1])
    assert words[1] == "http://127.0.0.1:8000/v1/completions"
    assert json.loads(words[words.index("-d") + 1]) == {"model": "base", "prompt": "47 + 38 ="}
    template = dataclasses.replace(settings, chat_template="{{ messages }}")
    assert "/v1/chat/completions" in greeting(ApiJob(template, [], str(tmp_path)), ("127.0.0.1", 8000), 1.0)


def test_a_closed_terminal_ends_nothing_and_without_a_key_file_nothing_is_read(server: Running) -> None:
    """Nor does a signal to all processes, as service managers send it."""
    processes = [server.pid, *server.children()]
    for pid in processes:
        os.kill(pid, signal.SIGHUP)
    wait_for(lambda: "there is no --api-key-file to be read again" in server.output(), server.output)
    chat = {"model": "builtin", "messages": [{"role": "user", "content": "What is 47 + 38?"}]}
    assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
    assert [pid for pid in processes if not is_alive(pid)] == []


def test_only_this_machine_reaches_it_by_its_own_name(server: Running) -> None:
    assert server.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert server.http.get("/v1/models", headers={"Host": "my.box"}).status_code == 200


def test_no_header_tells_what_serves(server: Running) -> None:
    assert "server" not in server.http.get("/health").headers


def test_the_api_process_has_not_loaded_torch(server: Running) -> None:
    assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{server.engine()}/maps").read_text()


def test_the_engines_threads_spin_briefly(server: Running) -> None:
    assert b"GOMP_SPINCOUNT=10000" in Path(f"/proc/{server.engine()}/environ").read_bytes().split(b"\0")


def test_what_the_server_keeps_on_disk_is_its_users_alone(server: Running) -> None:
    assert server.folder.stat().st_mode & 0o777 == 0o700


# ---- each with a server of its own ----


def test_sigterm_lets_requests_finish_and_takes_no_others() -> None:
    with running() as server:
        children = server.children()
        with server.stream(max_tokens=1000) as events:
            next(events)
            server.signal(signal.SIGTERM)
            wait_for(lambda: server.status("/ready") == 503, server.output)
            refused = server.complete(max_tokens=1)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
            rest = list(events)
        assert rest[-1] == {"done": True}
        assert not any("error" in event for event in rest)
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert_nothing_is_left(server, children)


def test_what_does_not_finish_in_time_ends_with_an_error_in_the_stream() -> None:
    with running("--shutdown-timeout", "0.2") as server:
        with server.stream(max_tokens=1000) as events:
            next(events)
            start = time.monotonic()
            server.signal(signal.SIGTERM)
            rest = list(events)
        assert rest[-1]["error"]["type"] == "service_unavailable_error"
        assert server.wait() == 0
        assert time.monotonic() - start < 25  # and not the 30 s that it has otherwise
        assert "did not finish" in server.output()


def test_ctrl_c_ends_it_and_a_second_one_at_once() -> None:
    with running() as server:
        children = server.children()
        with server.stream(max_tokens=1000) as events:
            next(events)
            server.signal(signal.SIGINT)
            wait_for(lambda: server.status("/ready") == 503, server.output)
            start = time.monotonic()
            server.signal(signal.SIGINT)
            assert server.wait() == 128 + signal.SIGINT
            assert time.monotonic() - start < 25  # the first one lets requests go on for 30 s
        assert_nothing_is_left(server, children)


def test_a_killed_launcher_leaves_no_process_behind() -> None:
    with running() as server:
        children = server.children()
        assert len(children) >= 1
        server.signal(signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, children)))


def test_sigterm_while_the_model_loads_ends_it() -> None:
    process = serve("--port", "0")
    wait_for(lambda: descendants(process.pid))
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "Strata serves" not in output
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("api_processes", [1, 2])
def test_keys_are_read_again_metrics_have_a_port_and_processes_drain_together(
    api_processes: int, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("alice:sk-alice")
    options = ("--api-workers", str(api_processes), "--api-key-file", str(keys), "--metrics-port", "0")
    with running(*options, environment={"STRATA_API_KEY": "me:sk-1"}, key="sk-1") as server:
        children = server.children()
        workers = [pid for pid in children if b"strata.serve.processes.worker" in command_line(pid)]
        assert len(workers) == (0 if api_processes == 1 else api_processes)
        for pid in (server.pid, *children):
            assert b"sk-1" not in command_line(pid)

        def answers(key: str) -> set[int]:
            """The statuses that connections get, of whichever process."""
            bearer = {"Authorization": f"Bearer {key}"}
            return {httpx.get(f"{server.url}/v1/models", headers=bearer).status_code for _ in range(4)}

        def read_again(text: str, said: str) -> None:
            keys.write_text(text)
            before = server.output().count(said)
            server.signal(signal.SIGHUP)
            wait_for(lambda: server.output().count(said) > before, server.output)

        assert (answers("sk-alice"), answers("sk-bob"), answers("sk-x")) == ({200}, {401}, {401})
        with server.stream(max_tokens=1000) as events:
            next(events)
            read_again("bob:sk-bob", "the API keys were read again keys=2 new=bob gone=alice")
            wait_for(lambda: answers("sk-bob") == {200}, server.output)
            wait_for(lambda: answers("sk-alice") == {401}, server.output)
            read_again("bob:sk bob", "the API keys stay as they are")
            assert (answers("sk-bob"), answers("sk-1"), answers("sk-x")) == ({200}, {200}, {401})
            assert "sk bob" not in server.output()
            text = next(line for line in server.lines if line.startswith("Metrics without a key: ")).split()[-1]
            counted = httpx.get(text).text
            assert httpx.get(text.replace("/metrics", "/v1/models")).status_code == 404
            assert re.search(r'strata_caller_requests_total{caller="me",model_name="builtin"} 1.0', counted)
            unauthorized = r'strata_http_requests_total{handler="/v1/models",method="GET",.*status="401"} (\d+)'
            assert int(re.search(unauthorized, counted)[1]) >= 12  # type: ignore[index]
            lines = [line for line in server.lines if "GET /v1/models status=401" in line]
            assert lines
            assert all(" error_code=invalid_api_key" in line for line in lines)
            server.signal(signal.SIGTERM)
            rest = list(events)
        assert rest[-1] == {"done": True}
        assert server.wait() == 0
        assert_nothing_is_left(server, children)


def test_an_api_process_that_dies_at_once_ends_the_server() -> None:
    with running("--api-workers", "2") as server:
        children = server.children()
        worker = next(pid for pid in children if b"strata.serve.processes.worker" in command_line(pid))
        os.kill(worker, signal.SIGKILL)
        assert server.wait() == 1
        assert "API process" in server.output()
        assert_nothing_is_left(server, children)


# ---- folders that cannot be served ----


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The built-in model, to be broken."""
    for file in BUILTIN.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_folder_that_cannot_be_served_is_one_line_and_soon(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    status, output, seconds = refusal(str(copied), "--port", "0")
    assert status == 1
    errors = [line for line in output.splitlines() if line.startswith("strata: error: ")]
    assert len(errors) == 1
    assert "model.safetensors" in errors[0]
    assert "Traceback" not in output
    assert seconds < 30
