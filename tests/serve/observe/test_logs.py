"""Log lines: one per event whatever is in it, the request's line with what it came to, no prompt and no key."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient

from strata.serve.api.prompts import chat_prompt
from strata.serve.http.errors import ERROR_HANDLERS, ApiError
from strata.serve.http.gate import Gate
from strata.serve.http.keys import KeyRing
from strata.serve.http.limits import Caller
from strata.serve.http.sse import EventStream
from strata.serve.observe.logs import AccessLog, configure_logging, log_event, note_generation, note_prompt
from strata.serve.observe.metrics import Metrics, RequestRecord
from strata.serve.processes.drain import Drain
from strata.serve.settings import ServeSettings
from strata.text.spelled_tokens import ChatText

RECORD = RequestRecord(
    "chat", "stop", 100.0, 101.0, 12, scheduled=100.01, first_token=100.05, cached_tokens=8, output_tokens=40
)


@dataclass
class Ended:
    record: RequestRecord | None = None


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The loggers as they were: pytest's own capture hangs on them."""
    loggers = [logging.getLogger(name) for name in ("strata", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def written_to(as_json: bool = True) -> io.StringIO:
    """Where the log goes from now on."""
    stream = io.StringIO()
    configure_logging(as_json, stream)
    return stream


def logged(as_json: bool, app: Any, *, path: str = "/v1/chat/completions", log_prompts: bool = False) -> str:
    """What one request to `app` leaves in the log."""
    stream = written_to(as_json)
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"key=sk-in-the-query",
        "headers": [(b"authorization", b"Bearer sk-in-the-header")],
    }

    async def send(message: Any) -> None:
        pass

    asyncio.run(AccessLog(app, log_prompts=log_prompts)(scope, None, send))  # type: ignore[arg-type]
    return stream.getvalue()


async def answers(scope: Any, receive: Any, send: Any) -> None:
    scope["state"]["caller"] = SimpleNamespace(name="alice", salt="sk-in-the-salt")
    generation = Ended()
    note_generation(scope, generation)
    note_prompt(scope, "my secret diary")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"req-7")]})
    generation.record = RECORD  # a stream ends after its handler has returned
    await send({"type": "http.response.body", "body": b""})


def test_json_line_of_a_request() -> None:
    line = logged(True, answers)
    assert line.count("\n") == 1
    told = json.loads(line)
    assert told.pop("ms") >= 0
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "level": "info",
        "logger": "strata.access",
        "event": "POST /v1/chat/completions",
        "status": 200,
        "request_id": "req-7",
        "caller": "alice",
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "output_tokens": 40,
        "ttft_ms": 50.0,
        "finish_reason": "stop",
    }


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (ApiError(401, "no", code="invalid_api_key"), "invalid_api_key"),
        (ApiError(400, "the prompt has no tokens", param="prompt"), "invalid_request_error"),
        (ApiError(503, "no", code="queue_full"), "queue_full"),
    ],
)
@pytest.mark.parametrize("where", ["gate", "route", "stream"])
def test_the_line_of_a_request_that_failed_has_the_code_of_its_error(error: ApiError, word: str, where: str) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        raise error

    async def route() -> Response:
        if where == "stream":
            return EventStream(events())
        raise error

    def enter(caller: Caller) -> None:
        if where == "gate":
            raise error

    app = FastAPI(exception_handlers=ERROR_HANDLERS)
    app.add_api_route("/x", route, methods=["POST"])
    app.state.server = SimpleNamespace(metrics=Metrics("m"))
    settings = ServeSettings("m", ("m",), host="0.0.0.0")
    gate = Gate(app, settings, KeyRing([]), Drain(), enter, lambda reason: None)
    stream = written_to()
    answer = TestClient(AccessLog(gate)).post("/x")
    line = json.loads(stream.getvalue())
    assert line["error_code"] == word
    assert line["status"] == answer.status_code == (200 if where == "stream" else error.status)


def test_a_path_that_is_not_there_is_told_in_the_line() -> None:
    app = FastAPI(exception_handlers=ERROR_HANDLERS)
    stream = written_to()
    TestClient(AccessLog(app)).get("/nowhere")
    assert json.loads(stream.getvalue())["error_code"] == "unknown_url"


def test_human_line_of_a_request() -> None:
    line = logged(False, answers)
    assert line.count("\n") == 1
    assert "info  POST /v1/chat/completions status=200 ms=" in line
    assert "request_id=req-7 caller=alice prompt_tokens=12 cached_tokens=8 output_tokens=40" in line


@pytest.mark.parametrize("as_json", [True, False])
def test_prompts_only_when_asked_for_and_keys_never(as_json: bool) -> None:
    assert "secret diary" not in logged(as_json, answers)
    asked = logged(as_json, answers, log_prompts=True)
    assert "secret diary" in asked
    assert "sk-in" not in asked


def test_a_prompt_that_is_refused_for_its_length_is_told_too() -> None:
    """The template makes more of two characters than the model takes."""

    async def run(admission: Any, work: Any) -> ChatText:
        return ChatText("a system prompt, then: hi")

    tokenizer = SimpleNamespace(characters_per_token=1, rendering=lambda messages: None)
    ready = SimpleNamespace(max_model_len=5)
    state: Any = SimpleNamespace(
        tokenizer=tokenizer, templates=SimpleNamespace(run=run), client=SimpleNamespace(ready=ready)
    )
    admission: Any = None
    told: list[str] = []
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ApiError, match="at most 5 tokens"):
        asyncio.run(chat_prompt(state, admission, messages, rendered=told.append))
    assert told == ["a system prompt, then: hi"]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_path_cannot_forge_a_line(as_json: bool) -> None:
    line = logged(as_json, answers, path="/x\n12:00:00 info  engine ready\x1b[2J\u2028")
    assert line.count("\n") == 1
    assert "\x1b" not in line
    assert len(line.splitlines()) == 1


def test_a_path_cannot_forge_a_field() -> None:
    line = logged(False, answers, path="/größe status=500 caller=bob")
    assert re.findall(r" (?:status|caller)=\S+", line) == [" status=200", " caller=alice"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/page/chat.js"])
def test_what_machines_ask_for_leaves_no_line(path: str) -> None:
    assert logged(True, answers, path=path) == ""


def test_a_client_that_left_before_the_answer_has_a_line() -> None:
    async def cancelled(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    stream = written_to()
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(AccessLog(cancelled)(scope, None, None))  # type: ignore[arg-type]
    assert json.loads(stream.getvalue())["status"] == "none"


def test_an_error_keeps_its_traceback() -> None:
    for as_json in (True, False):
        stream = written_to(as_json)
        try:
            raise ZeroDivisionError("of the page size")
        except ZeroDivisionError:
            logging.getLogger("strata.serve").exception("a handler failed")
        written = stream.getvalue()
        assert "ZeroDivisionError: of the page size" in (json.loads(written)["exception"] if as_json else written)


def test_fields_of_an_event() -> None:
    stream = written_to()
    log_event(logging.getLogger("strata.serve"), "listening", address="127.0.0.1:8000", workers=None)
    told = json.loads(stream.getvalue())
    assert (told["event"], told["address"]) == ("listening", "127.0.0.1:8000")
    assert "workers" not in told


def test_uvicorn_is_written_the_same_way() -> None:
    stream = written_to()
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    assert json.loads(stream.getvalue())["event"] == "Invalid HTTP request received."
