"""What the server logs: one line per event for people, or one JSON object per line (`--log-json`).

No line holds a header, a query or a key; prompts stand in the request's line only if `--log-prompts` asks for them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol, TextIO
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata.serve.observe.metrics import RequestRecord
from strata.serve.observe.tracing import RequestTracer

# Asked for every second or so by machines, or by the dozen when a page is opened: they would bury all other lines.
_QUIET_PATHS = ("/health", "/ready", "/metrics", "/page/")

_access = logging.getLogger("strata.access")


def configure_logging(as_json: bool, stream: TextIO | None = None) -> None:
    """Write what Strata and uvicorn log to `stream` (standard error if None); uvicorn must leave its own set-up out."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    for name in ("strata", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO)


def log_event(logger: logging.Logger, event: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Log `event` with what belongs to it; a field that is None is left out."""
    logger.log(level, event, extra={"fields": {name: value for name, value in fields.items() if value is not None}})


class LineFormatter(logging.Formatter):
    """`12:34:56 info  event name=value name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = "".join(f" {name}={value}" for name, value in _fields_of(record).items())
        line = _one_line(f"{clock} {record.levelname.lower():<5} {record.getMessage()}{fields}")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """`{"time": RFC 3339, "level": ..., "logger": ..., "event": ..., and the event's own fields}`."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class Generating(Protocol):
    """A request's way through the engine; `record` is None until it has ended."""

    @property
    def record(self) -> RequestRecord | None: ...


def note_generation(scope: Scope, generation: Generating) -> None:
    """Note for the request's line and trace a generation that the request has started."""
    _notes(scope).setdefault("generations", []).append(generation)


def note_prompt(scope: Scope, prompt: str) -> None:
    """Leave the prompt for the request's line, should prompts be logged."""
    _notes(scope)["prompt"] = prompt


def note_error(scope: Scope, code: str) -> None:
    """Leave the code of the error that the request is answered with for its line."""
    _notes(scope)["error_code"] = code


def log_refusal(status: int, code: str) -> None:
    """The line of what was refused before it was a request."""
    log_event(_access, "no valid request", status=status, error_code=code)


class AccessLog:
    """ASGI middleware, the outermost: when a request is over it writes the request's line and its trace.

    answered: called with the method, path and status (None: the client left before there was one) of each.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        log_prompts: bool = False,
        tracer: RequestTracer | None = None,
        answered: Callable[[str, str, int | None], None] = lambda method, path, status: None,
    ) -> None:
        self._app = app
        self._answered = answered
        self._log_prompts = log_prompts
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival = time.monotonic()
        start: Message = {}

        async def send_and_look(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            await send(message)

        _notes(scope)
        try:
            await self._app(scope, receive, send_and_look)
        finally:
            self._answered(scope["method"], scope["path"], start.get("status"))
            self._write_line(scope, start, time.monotonic() - arrival)

    def _write_line(self, scope: Scope, start: Message, seconds: float) -> None:
        notes = _notes(scope)
        records = [generation.record for generation in notes.get("generations", []) if generation.record is not None]
        request_id = _header(start.get("headers", ()), b"x-request-id")
        log_event(
            _access,
            f"{scope['method']} {quote(scope['path'])}",  # a space would make a field of what follows it
            level=logging.DEBUG if scope["path"].startswith(_QUIET_PATHS) else logging.INFO,
            status=start.get("status", "none"),  # the client left before there was one
            ms=round(seconds * 1e3, 1),
            request_id=request_id,
            caller=getattr(notes.get("caller"), "name", None),
            error_code=notes.get("error_code"),
            **_usage(records),
            prompt=notes.get("prompt") if self._log_prompts else None,
        )
        if self._tracer is not None:
            for record in records:
                self._tracer.trace(record, request_id, _header(scope["headers"], b"traceparent"))


def _usage(records: list[RequestRecord]) -> dict[str, object]:
    """What a request's generations came to."""
    if not records:
        return {}
    first_tokens = [record.first_token - record.arrival for record in records if record.first_token is not None]
    return {
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "cached_tokens": sum(record.cached_tokens for record in records),
        "output_tokens": sum(record.output_tokens for record in records),
        "ttft_ms": round(min(first_tokens) * 1e3, 1) if first_tokens else None,
        "finish_reason": "+".join(sorted({record.reason for record in records})),
    }


def _notes(scope: Scope) -> dict[str, Any]:
    """What is known of a request besides its ASGI scope; Starlette shows it to handlers as `request.state`."""
    notes: dict[str, Any] = scope.setdefault("state", {})
    return notes


def _header(headers: Any, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), None)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


def _one_line(text: str) -> str:
    """Nothing in a path or a message may begin a line of its own or steer a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
