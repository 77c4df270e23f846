"""The API process's end of the line to the engine: requests out, what they bring back in, over one ZeroMQ socket."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import msgspec
import zmq

from strata.engine.process import messages
from strata.engine.watch.request_ledger import RequestLedger
from strata.serve.engine_ends import EngineEnds

# Frames that are read before other tasks get a turn.
FRAMES_PER_READ = 64
# How often a connection to an engine that has not bound its address yet is tried, in milliseconds.
RETRY_MS = 20
# How long a closing client waits until its last messages are out, in milliseconds.
LINGER_MS = 500
# In which an engine answers what it is asked for between two steps.
ANSWER_SECONDS = 10.0
_UNEXPLAINED = "the engine process has ended"

_log = logging.getLogger("strata.serve")


class EngineRefused(ValueError):
    """The request can never run; the message is one line for its sender."""


class EngineGone(RuntimeError):
    """The engine has ended, or the client was closed: all its requests are lost."""


class Stream:
    """What one request brings: an async iterator that ends when all samples have ended.

    Each item is all that has come since the last one, at most one Delta a sample; so a reader that falls behind gets
    fewer, longer ones, and what waits for it is never more than the request's output. Raises EngineRefused, EngineGone,
    or TimeoutError after `expire`. Whoever stops reading early calls `aclose`.

    client: of the one engine that has the request.
    prompt_logprobs: of the prompt's tokens from the second on, complete when the first item is there; empty unless
        asked for.
    """

    def __init__(self, client: EngineClient, id: str, samples: int) -> None:
        self.id = id
        self.prompt_logprobs: list[messages.TokenLogprobs] = []
        self.client = client
        self._running = set(range(samples))
        self._held: dict[int, messages.Delta] = {}
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> list[messages.Delta]:
        while not self._held:
            if self._failure is not None:
                raise self._failure
            if not self._running:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        held, self._held = self._held, {}
        return list(held.values())

    def expire(self) -> None:
        """Its time is over: what has come may still be read, and nothing more comes."""
        self._running.clear()
        self._fail(TimeoutError())

    async def aclose(self) -> None:
        """Abort what has not ended. Safe to call at any time, also twice."""
        self.client.abort(self.id)
        self._end()

    def _take(self, delta: messages.Delta) -> bool:
        """Hold a delta for the reader; returns whether that ended the request."""
        index = delta.index
        if index not in self._running:  # it was on its way when the sample was finished from here
            return False
        earlier = self._held.get(index)
        self._held[index] = delta if earlier is None else _merged(earlier, delta)
        if delta.finish_reason is not None:
            self._running.remove(index)
        self._wake()
        return not self._running

    def _finish(self, index: int) -> None:
        self._running.discard(index)
        self._held.pop(index, None)
        self._wake()

    def _fail(self, failure: Exception) -> None:
        self._failure = failure
        self._wake()

    def _end(self) -> None:
        self._running.clear()
        self._held.clear()
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class EngineClient:
    """A connection to one engine process. It belongs to the event loop that it was made in.

    The engine's death ends it: nothing is sent anew, since the engine has lost all requests. Make another for the next
    engine.

    ready: what the engine is. statistics: the newest that it sent, twice a second at least.
    alive: whether requests can still be answered.
    """

    ready: messages.Ready

    def __init__(self, address: str, silence_timeout: float = 0.0, ends: EngineEnds | None = None) -> None:
        """Prepares the connection; `connect` makes one that is ready for use."""
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[messages.Ready | None] = self._loop.create_future()
        self._dead: asyncio.Future[str] = self._loop.create_future()
        self._ends = ends
        self._finding: asyncio.Task[None] | None = None  # how the engine has ended
        self._streams: dict[str, Stream] = {}
        self._answers: dict[str, asyncio.Future[Any]] = {}  # vectors and ledgers that are asked for
        self._max_silence = silence_timeout
        self._silent_since = 0.0  # by the loop's clock, of an engine that has requests
        self._watchdog: asyncio.TimerHandle | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[messages.FromEngine] = msgspec.msgpack.Decoder(messages.FromEngine)
        self.statistics = messages.Statistics()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        # No limits: the engine reads at every step, and what is sent to it is bounded by the server's own limits.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._watch)
        self._socket.connect(address)
        self._watch()  # a descriptor tells of arrivals only once its socket has been found empty
        self._send(messages.Hello())

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        timeout: float | None = None,
        silence_timeout: float = 0.0,
        ends: EngineEnds | None = None,
    ) -> EngineClient:
        """A client of the engine that serves, or will serve, at `address`; waits until it is ready.

        silence_timeout: seconds after which an engine that has requests and says nothing is killed; 0 for never. (One
            that works says how it stands twice a second, to clients whose requests wait too.)
        ends: where the engine's parent says how it ended, if it could not say so itself; None: nowhere.
        Raises EngineGone if the engine dies meanwhile or is not ready after `timeout` seconds.
        """
        client = cls(address, silence_timeout, ends)
        try:
            async with asyncio.timeout(timeout):
                ready = await client._started
            if ready is None:
                raise EngineGone(client._dead.result())
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise EngineGone(f"the engine at {address} was not ready after {timeout} s") from None
            raise
        client.ready = ready
        return client

    @property
    def alive(self) -> bool:
        return not self._dead.done() and self._finding is None

    @property
    def each_statistics(self) -> tuple[messages.Statistics]:
        """How the engine stands, as `Replicas` tells it of several; nothing runs or waits in one that has ended."""
        return (self.statistics if self.alive else messages.ended(self.statistics),)

    @property
    def cause(self) -> str:
        """Why it is not alive, in one line, as far as that is known."""
        return self._dead.result() if self._dead.done() else _UNEXPLAINED

    async def wait_dead(self) -> str:
        """Wait until the engine has ended or the client is closed; returns why, in one line."""
        return await asyncio.shield(self._dead)

    async def close(self) -> None:
        """Abort all requests and end the connection. Safe to call twice."""
        if self._streams or self._answers:
            self._send(messages.Abort([*self._streams, *self._answers]))
        if self._finding is not None:
            self._finding.cancel()
        self._die("the connection to the engine was closed")
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            await asyncio.to_thread(self._context.term)

    def submit(self, add: messages.Add) -> Stream:
        """Ask for a generation. Raises ValueError if the id is that of an unfinished request."""
        self._check_new(add.id)
        stream = Stream(self, add.id, add.params.n)
        if self._dead.done():
            stream._fail(EngineGone(self._dead.result()))
            return stream
        self._watch_silence()
        self._streams[add.id] = stream
        self._send(add)
        return stream

    async def embed(self, request: messages.Embed) -> list[float]:
        """One vector. Raises EngineRefused, EngineGone, or ValueError if the id is that of an unfinished request."""
        self._check_new(request.id)
        try:
            vector: list[float] = await self._answer(request.id, request)
            return vector
        except asyncio.CancelledError:
            self._send(messages.Abort([request.id]))
            raise

    def abort(self, id: str) -> None:
        """End a generation, wherever it is: its stream ends without a word. Unknown ids are ignored."""
        stream = self._streams.pop(id, None)
        if stream is not None:
            stream._end()
            self._send(messages.Abort([id]))

    def finish(self, id: str, index: int, stop: str) -> None:
        """End one sample, whose text has reached a stop string; its stream tells nothing more of it."""
        stream = self._streams.get(id)
        if stream is None or index not in stream._running:
            return
        self._send(messages.Finish(id, index, stop))
        stream._finish(index)
        if not stream._running:
            del self._streams[id]

    def delivered(self, id: str, ended: float) -> None:
        """The last text of a request was ready at `ended`, in seconds of `time.monotonic()`."""
        self._send(messages.Delivered(id, ended))

    async def ledgers(self, name: str) -> list[RequestLedger]:
        """Of the newest requests of that name (`Add.names` and ids) that the engine knows, in order. Raises EngineGone,
        also if it does not answer in time."""
        id = uuid4().hex
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found: list[RequestLedger] = await self._answer(id, messages.AskLedgers(id, name))
                return found
        except TimeoutError:
            raise EngineGone(f"it has not answered for {ANSWER_SECONDS:g} s") from None

    async def _answer(self, id: str, message: messages.ToEngine) -> Any:
        """What the engine says to a message, once. Raises EngineGone."""
        if not self.alive:
            raise EngineGone(await self.wait_dead())
        self._watch_silence()
        answer = self._answers[id] = self._loop.create_future()
        self._send(message)
        try:
            return await answer
        finally:
            del self._answers[id]

    def _check_new(self, id: str) -> None:
        if id in self._streams or id in self._answers:
            raise ValueError(f"request id {id!r} is in use by an unfinished request: choose another")

    def _send(self, message: messages.ToEngine) -> None:
        if not self.alive:
            return
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        self._read_later()

    def _read_later(self) -> None:
        """The socket's descriptor tells of arrivals only once, and sending may have taken note of them already."""
        if _has_mail(self._socket):
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        for _ in range(FRAMES_PER_READ):
            if not self.alive or not _has_mail(self._socket):
                return
            self._silent_since = self._loop.time()
            self._receive(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        self._read_later()

    def _receive(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Step(deltas, statistics):
                self.statistics = statistics
                streams = self._streams
                for delta in deltas:
                    stream = streams.get(delta.id)
                    if stream is not None and stream._take(delta):
                        del streams[delta.id]
            case messages.PromptLogprobs(id, _, logprobs):
                if id in self._streams:
                    self._streams[id].prompt_logprobs += logprobs
            case messages.Embedding(id, values):
                self._answered_with(id, struct.unpack(f"<{len(values) // 4}f", values))
            case messages.Refused(id, reason):
                self._refuse(id, EngineRefused(reason))
            case messages.Ledgers(id, ledgers):
                self._answered_with(id, ledgers)
            case messages.Ready():
                if not self._started.done():
                    self._started.set_result(message)
            case messages.Fault(reason):
                self._die(reason)

    def _answered_with(self, id: str, answer: Sequence[Any]) -> None:
        if id in self._answers and not self._answers[id].done():
            self._answers[id].set_result(list(answer))

    def _refuse(self, id: str, failure: EngineRefused | EngineGone) -> None:
        stream = self._streams.pop(id, None)
        if stream is not None:
            stream._fail(failure)
        elif id in self._answers and not self._answers[id].done():
            self._answers[id].set_exception(failure)

    def _watch(self) -> None:
        """The monitor has something to tell, which can only be that the engine has let go of the connection."""
        if self.alive and _has_mail(self._monitor):
            while self.alive and _has_mail(self._socket):
                self._read()  # its last words
            ready = self._started.result() if self._started.done() else None
            if self.alive and self._ends is not None and ready is not None and ready.pid is not None:
                self._hang_up()
                self._finding = self._loop.create_task(self._die_as_found(self._ends, ready.pid))
            else:
                self._die(_UNEXPLAINED)

    async def _die_as_found(self, ends: EngineEnds, pid: int) -> None:
        self._die(await ends.find(pid) or _UNEXPLAINED)

    def _watch_silence(self) -> None:
        """A request is about to be sent."""
        if not self.alive:
            return
        if not self._streams and not self._answers:
            self._silent_since = self._loop.time()
        if self._max_silence and self._watchdog is None:
            self._watchdog = self._loop.call_later(self._max_silence, self._check_silence)

    def _check_silence(self) -> None:
        self._watchdog = None
        if not self._streams and not self._answers:
            return
        if _has_mail(self._socket):  # this process was busy
            self._silent_since = self._loop.time()
        due = self._silent_since + self._max_silence
        if self._loop.time() < due:
            self._watchdog = self._loop.call_at(due, self._check_silence)
            return
        reason = f"it has requests and said nothing for {self._max_silence:g} s"
        _log.error("the engine is taken for dead and killed: %s", reason)
        if self.ready.pid is not None:  # whoever has started it learns of it so
            if self._ends is not None:
                self._ends.tell(self.ready.pid, reason)  # for other processes, which see but its end
            with suppress(ProcessLookupError):
                os.kill(self.ready.pid, signal.SIGKILL)
        self._die(reason)

    def _die(self, reason: str) -> None:
        if self._dead.done():
            return
        self._dead.set_result(reason)
        self._hang_up()
        if not self._started.done():
            self._started.set_result(None)
        for id in (*self._streams, *self._answers):
            self._refuse(id, EngineGone(reason))

    def _hang_up(self) -> None:
        """Hear and send nothing more. A second call has no effect."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._monitor.fileno())


def _has_mail(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _merged(first: messages.Delta, then: messages.Delta) -> messages.Delta:
    """Two deltas of one sample as one. `first` is used up."""
    first.tokens.extend(then.tokens)
    if first.logprobs is not None and then.logprobs is not None:
        first.logprobs.extend(then.logprobs)
    return messages.Delta(
        first.id,
        first.index,
        first.tokens,
        then.finish_reason,
        then.stop_reason,
        first.logprobs if first.logprobs is not None else then.logprobs,
        first.scheduled,
        first.cached_tokens,
        then.error,
    )
