"""An engine process without a model, to measure what stands before the engine: it gives tokens at a set pace.

It speaks strata/engine/process/messages.py as `strata.engine.process.worker` does. A new request gets its first token
at once, and each step gives one token to every request that runs; tokens of two steps never come in one message.
benchmarks/http_overhead.py starts it, with its StubConfig as JSON on standard input.
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import zmq

from strata.engine.process.messages import (
    Abort,
    Add,
    AskLedgers,
    Delta,
    Finish,
    Hello,
    Ledgers,
    Ready,
    Statistics,
    Step,
    ToEngine,
)
from strata.engine.sampling_params import SamplingParams


class StubConfig(msgspec.Struct, forbid_unknown_fields=True):
    """address: of the ZeroMQ socket. interval: seconds between two steps. tokens: ids that answers are made of.

    vocab_size, max_model_len: what the model would have.
    """

    address: str
    interval: float = 0.01
    tokens: tuple[int, ...] = (0,)
    vocab_size: int = 1 << 17
    max_model_len: int = 1 << 17


@dataclass
class Running:
    """One sample. client: whom its tokens are for. left: tokens that are to come."""

    client: bytes
    id: str
    index: int
    left: int


class StubEngine:
    """Requests in, tokens out. Ends with its parent: when standard input does."""

    STATISTICS_EVERY: ClassVar[float] = 0.5

    def __init__(self, config: StubConfig) -> None:
        self._config = config
        self._running: list[Running] = []
        self._clients: set[bytes] = set()
        self._steps = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.bind(config.address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)

    def serve(self) -> None:
        """Serve until standard input is closed."""
        next_step, next_statistics = 0.0, 0.0
        while True:
            due = min(next_statistics, next_step if self._running else math.inf)
            ready = dict(self._poller.poll(max(0, math.ceil(1e3 * (due - time.monotonic())))))
            if sys.stdin.fileno() in ready:
                return
            idle = not self._running
            self._receive()
            now = time.monotonic()
            if self._running and (idle or now >= next_step):
                # After a rest the pace starts anew; otherwise a late step is made up for by an early one.
                next_step = (now if idle else max(next_step, now - 10 * self._config.interval)) + self._config.interval
                if not idle:
                    self._step(self._running)
            if now >= next_statistics:
                next_statistics = now + self.STATISTICS_EVERY
                for client in self._clients:
                    self._tell(client, [])

    def _receive(self) -> None:
        while True:
            try:
                client, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            match self._decoder.decode(frame):
                case Hello():
                    self._clients.add(client)
                    self._socket.send_multipart([client, self._encoder.encode(self._ready())])
                case Add(id=id, params=params):
                    samples = [Running(client, id, index, params.max_tokens or 16) for index in range(params.n)]
                    self._running += samples
                    self._step(samples, first=True)
                case Abort(ids):
                    self._running = [one for one in self._running if one.id not in ids]
                case AskLedgers(id):  # it keeps none
                    self._socket.send_multipart([client, self._encoder.encode(Ledgers(id, []))])
                case Finish(id, index):
                    self._running = [one for one in self._running if (one.id, one.index) != (id, index)]

    def _step(self, samples: list[Running], first: bool = False) -> None:
        """One token for each of some samples."""
        self._steps += 1
        token = self._config.tokens[self._steps % len(self._config.tokens)]
        scheduled = time.monotonic() if first else None
        told: dict[bytes, list[Delta]] = {}
        for one in samples:
            one.left -= 1
            reason = None if one.left else "length"
            delta = Delta(one.id, one.index, [token], reason, scheduled=scheduled, cached_tokens=0 if first else None)
            told.setdefault(one.client, []).append(delta)
        if any(not one.left for one in samples):
            self._running = [one for one in self._running if one.left]
        for client, deltas in told.items():
            self._tell(client, deltas)

    def _tell(self, client: bytes, deltas: list[Delta]) -> None:
        step = Step(deltas, Statistics(running=len(self._running), steps=self._steps))
        self._socket.send_multipart([client, self._encoder.encode(step)])

    def _ready(self) -> Ready:
        return Ready(
            model="stub",
            vocab_size=self._config.vocab_size,
            hidden_size=8,
            max_model_len=self._config.max_model_len,
            eos_ids=[],
            default_params=SamplingParams(),
            max_sequences=4096,
            num_pages=1 << 20,
            page_size=16,
            device="none",
            startup={},
            pid=os.getpid(),
        )


if __name__ == "__main__":
    StubEngine(msgspec.json.decode(sys.stdin.readline(), type=StubConfig)).serve()
