"""Reading one streamed answer: server-sent events, when text came in them, and whether the answer is whole."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

DONE = b"[DONE]"


@dataclass(frozen=True)
class AnswerFault:
    """Why a request has no good answer.

    kind: a short name to count by. lost: nobody said why; the client could only wait, or was cut off.
    """

    kind: str
    message: str
    lost: bool


class EventParser:
    """Server-sent events from bytes that are split anywhere. (WHATWG HTML, section "Server-sent events".)

    Only "data" fields are kept: the other fields have no use in OpenAI's API.
    """

    def __init__(self) -> None:
        self._rest = b""

    def append(self, part: bytes) -> list[bytes]:
        """The data of each event that is now complete."""
        text = self._rest + part if self._rest else part
        if b"\r" in text:
            held = b"\r" if text.endswith(b"\r") else b""  # its line feed may come with the next part
            text = text.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *events, self._rest = text.split(b"\n\n")
        return [data for event in events if (data := _data(event)) is not None]


class Answer:
    """A streamed answer while it comes; `append` is what `Client.post` calls with each part of the body.

    times: when each chunk with text came, in seconds of `time.perf_counter()`. prompt_tokens, output_tokens: by the
    usage that the server tells at the end, 0 before. ids: of the output, as far as the server tells them.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.ids: list[int] = []
        self._parser = EventParser()
        self._refusal = b""
        self._fault: AnswerFault | None = None
        self._done = False

    def append(self, status: int, part: bytes) -> None:
        if status != 200:
            self._refusal += part
            return
        now = time.perf_counter()
        for data in self._parser.append(part):
            if data == DONE:
                self._done = True
            else:
                self._take(data, now)

    def fault(self, status: int, asked: int, *, with_ids: bool = False) -> AnswerFault | None:
        """What is wrong with the answer now that it has ended; None if it is whole and has `asked` output tokens, and
        if `with_ids` the ids of them all."""
        if status != 200:
            return AnswerFault(f"HTTP {status}", refusal_message(self._refusal), lost=False)
        if self._fault is not None:
            return self._fault
        if not self._done:
            return AnswerFault("cut", "the stream ended without [DONE]", lost=True)
        if self.output_tokens != asked:
            return AnswerFault("length", f"{self.output_tokens} output tokens came, {asked} were asked for", lost=False)
        if with_ids and len(self.ids) != asked:
            told = f"{len(self.ids)} token ids came of {asked}: the server must tell them (return_token_ids)"
            return AnswerFault("ids", told, lost=False)
        return None

    def _take(self, data: bytes, now: float) -> None:
        try:
            chunk = _DECODER.decode(data)
        except msgspec.MsgspecError as error:
            self._fault = AnswerFault("malformed", f"an event is not a chunk of an answer: {error}", lost=False)
            return
        if chunk.error is not None:
            self._fault = AnswerFault("error event", chunk.error.message, lost=False)
        if chunk.usage is not None:
            self.prompt_tokens, self.output_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        if any(choice.has_text for choice in chunk.choices):
            self.times.append(now)
        for choice in chunk.choices:
            if choice.token_ids is not None:
                self.ids += choice.token_ids


def refusal_message(body: bytes) -> str:
    """What an answer that is not 200 says: the message of OpenAI's error object, or a line from its beginning."""
    try:
        error = _DECODER.decode(body).error
    except msgspec.MsgspecError:
        error = None
    return " ".join(body[:200].decode("utf-8", "replace").split()) if error is None else error.message


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _AnswerChoice(msgspec.Struct):
    """Of a completion (`text`) or of a chat (`delta`)."""

    text: str = ""
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text) or (self.delta is not None and bool(self.delta.content or self.delta.reasoning_content))


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_AnswerChoice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_DECODER = msgspec.json.Decoder(_Chunk)
