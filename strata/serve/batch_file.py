"""Batch files in OpenAI's format: requests, one a line, and results, to which a later run adds what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import msgspec

from strata.files.json_object import why_no_json
from strata.files.json_rows import json_lines
from strata.files.locks import lock

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


# Of every line of results. What is cut off later than here, or within it, is ours.
_BEGINNING = b'{"id":"batch_req_'


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
    seen: dict[str, int] = {}
    try:
        for number, line in json_lines(file):
            request = _read_request(number, line)
            if isinstance(request, BatchRequest) and request.custom_id in seen:
                message = f"line {number}: line {seen[request.custom_id]} has the custom_id {request.custom_id!r:.80}"
                request = BatchFault(number, request.custom_id, "duplicate_custom_id", message)
            if isinstance(request, BatchRequest):
                seen[request.custom_id] = number
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
        return BatchFault(number, None, "invalid_json", why_no_json(line, error, number))
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
    """The file of results of a file of requests, one a line, written as they come. Use as a context manager: meanwhile
    no other run may write the file.

    total: lines of the requests that are to have a result.
    succeeded, failed: how many of them have one, from this run or an earlier one.
    first_fault: the first line that is no request; None if there is none.
    """

    def __init__(self, file: Path, requests: Iterable[BatchRequest | BatchFault]) -> None:
        """Raises ValueError for a file with anything but results of `requests`, and for one that another run writes. A
        last line of ours that was cut off is removed. An error of a line that is a request by now, or gone, is left
        there and does not count.
        """
        self.succeeded = 0
        self.failed = 0
        self._file_name = file
        self.first_fault: BatchFault | None = None
        self._asked: set[str] = set()
        self._unreadable: set[int] = set()
        for request in requests:
            if isinstance(request, BatchFault):
                self.first_fault = self.first_fault or request
                self._unreadable.add(request.line)
            else:
                self._asked.add(request.custom_id)
        self.total = len(self._asked) + len(self._unreadable)
        self._answered: set[str] = set()
        self._refused: set[int] = set()
        if file.exists() and not file.is_file():
            raise ValueError(f"{file} is no regular file: name one for the results")
        try:
            with ExitStack() as closing:
                # Without a buffer: what cannot be written must not be tried again when the file is closed.
                self._file = closing.enter_context(file.open("ab", buffering=0))
                lock(self._file, f"another run writes {file}: wait for its end, or name another file for the results")
                self._end = self._read(file)
                self._file.truncate(self._end)
                closing.pop_all()
        except OSError as error:
            raise ValueError(f"{file} cannot be written: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, request: BatchRequest | BatchFault) -> bool:
        if isinstance(request, BatchFault):
            return request.line in self._refused
        return request.custom_id in self._answered

    def answer(self, request: BatchRequest, status: int, body: bytes) -> None:
        """Add what a request was answered with. body: JSON. Raises ValueError if there is no room."""
        response = {"status_code": status, "request_id": uuid4().hex, "body": msgspec.Raw(body)}
        self._write({"custom_id": request.custom_id, "response": response, "error": None})
        self._count(status)

    def refuse(self, fault: BatchFault) -> None:
        """Add that a line is no request. Raises ValueError if there is no room."""
        error = {"code": fault.code, "message": fault.message, "param": None, "line": fault.line}
        self._write({"custom_id": fault.custom_id, "response": None, "error": error})
        self.failed += 1

    def _write(self, result: dict[str, Any]) -> None:
        line = _BEGINNING + uuid4().hex.encode() + b'",' + msgspec.json.encode(result)[1:] + b"\n"
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            with suppress(OSError):  # half a line does no harm, the next run removes it
                self._file.truncate(self._end)
            raise ValueError(
                f"{self._file_name} cannot be written: {error.strerror}. What it holds is whole: once there is room, "
                "the same command goes on where this one has stopped"
            ) from None
        self._end += len(line)

    def _read(self, file: Path) -> int:
        """Take note of what has a result. Returns where the last whole line ends."""
        end = 0
        foreign: list[str] = []
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    if not (line.startswith(_BEGINNING) or _BEGINNING.startswith(line)):
                        raise ValueError(f"{file} holds no results (line {number}): name another file, or remove it")
                    break
                end += len(line)
                try:
                    result = msgspec.json.decode(line, type=_Result)
                except (ValueError, RecursionError) as error:
                    why = why_no_json(line, error, number)
                    raise ValueError(f"{file} holds no results ({why}): name another file, or remove it") from None
                if result.response is not None and result.custom_id not in self._asked:
                    foreign.append(f"{result.custom_id!r:.80}")
                else:
                    self._note(result)
        if foreign:
            raise ValueError(
                f"{file} holds results of other requests ({len(foreign)}; the first has custom_id {foreign[0]}): name "
                "another file for the results, or the file of requests that these answer"
            )
        return end

    def _note(self, result: _Result) -> None:
        if result.response is not None and result.custom_id is not None:
            if result.custom_id not in self._answered:
                self._answered.add(result.custom_id)
                self._count(result.response.status_code)
        elif result.error is not None and result.error.line in self._unreadable - self._refused:
            self._refused.add(result.error.line)
            self.failed += 1

    def _count(self, status: int) -> None:
        if status == 200:
            self.succeeded += 1
        else:
            self.failed += 1
