"""Batch files in OpenAI's format: requests, one a line, and results, to which a later run adds what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


@dataclass(frozen=True)
class BatchRequest:
    """custom_id: names the request in both files. body: JSON."""

    line: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class BatchFault:
    """A line that is no request. line: from 1."""

    line: int
    custom_id: str | None
    code: str
    message: str


def read_requests(file: Path) -> Iterator[BatchRequest | BatchFault]:
    """What each line asks for; empty lines ask for nothing. Raises ValueError if the file cannot be read."""
    seen: set[str] = set()
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                request = _read_request(number, line)
                if isinstance(request, BatchRequest) and request.custom_id in seen:
                    message = f"line {number}: an earlier line has the custom_id {request.custom_id!r:.80}"
                    request = BatchFault(number, request.custom_id, "duplicate_custom_id", message)
                if isinstance(request, BatchRequest):
                    seen.add(request.custom_id)
                yield request
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None


def _read_request(number: int, line: bytes) -> BatchRequest | BatchFault:
    def fault(code: str, message: str) -> BatchFault:
        return BatchFault(number, custom_id if isinstance(custom_id, str) else None, code, f"line {number}: {message}")

    custom_id: Any = None
    try:
        given = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        return fault("invalid_json", f"not JSON: {error}")
    if not isinstance(given, dict):
        return fault("invalid_request", "a request is an object with custom_id, method, url and body")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return fault("missing_custom_id", "custom_id must be a string that is not empty")
    if given.get("method") != "POST":
        return fault("invalid_method", f'method must be "POST", got {given.get("method")!r:.80}')
    if given.get("url") not in URLS:
        return fault("invalid_url", f"url must be one of {', '.join(URLS)}, got {given.get('url')!r:.80}")
    if unknown := sorted(set(given) - {"custom_id", "method", "url", "body"}):
        return fault("invalid_request", f"{unknown[0]!r:.80} is no field of a request")
    body = given.get("body")
    if not isinstance(body, dict):
        return fault("invalid_request", "body must be an object")
    if body.get("stream"):
        return fault("invalid_request", "body.stream: results of a batch are not streamed")
    return BatchRequest(number, custom_id, given["url"], msgspec.json.encode(body))


class _Status(msgspec.Struct):
    status_code: int


class _Fault(msgspec.Struct):
    line: int


class _Result(msgspec.Struct):
    """What a later run has to know of a result."""

    custom_id: str | None
    response: _Status | None
    error: _Fault | None


class BatchResults:
    """The file of results, one a line, written as they come. Use as a context manager.

    succeeded, failed: how many there are, those of earlier runs included.
    """

    def __init__(self, file: Path) -> None:
        """Raises ValueError for a file with anything but results. A last line that was cut off is removed."""
        self.succeeded = 0
        self.failed = 0
        self._answered: set[str] = set()
        self._faulty: set[int] = set()
        try:
            self._file = file.open("ab+")
            self._read(file)
        except OSError as error:
            raise ValueError(f"{file} cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __contains__(self, request: BatchRequest | BatchFault) -> bool:
        if isinstance(request, BatchFault):
            return request.line in self._faulty
        return request.custom_id in self._answered

    def answer(self, request: BatchRequest, status: int, body: bytes) -> None:
        """Add what a request was answered with. body: JSON."""
        response = {"status_code": status, "request_id": uuid4().hex, "body": msgspec.Raw(body)}
        self._write({"custom_id": request.custom_id, "response": response, "error": None})
        self._count(status)

    def refuse(self, fault: BatchFault) -> None:
        """Add that a line is no request."""
        error = {"code": fault.code, "message": fault.message, "param": None, "line": fault.line}
        self._write({"custom_id": fault.custom_id, "response": None, "error": error})
        self.failed += 1

    def _write(self, result: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode({"id": f"batch_req_{uuid4().hex}", **result}) + b"\n")
        self._file.flush()

    def _read(self, file: Path) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                self._file.truncate(end)
                break
            end += len(line)
            try:
                result = msgspec.json.decode(line, type=_Result)
            except (ValueError, RecursionError):
                raise ValueError(f"{file} has no result in line {number}: name another file, or remove it") from None
            self._note(result)
        self._file.seek(0, 2)

    def _note(self, result: _Result) -> None:
        if result.response is not None and result.custom_id is not None:
            self._answered.add(result.custom_id)
            self._count(result.response.status_code)
        elif result.error is not None:
            self._faulty.add(result.error.line)
            self.failed += 1

    def _count(self, status: int) -> None:
        if status == 200:
            self.succeeded += 1
        else:
            self.failed += 1
