"""The engine's socket and the loop around it: frames are taken while a step is put off, and steps are not late."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from strata.engine.process.worker import Wire, serve


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    tmp_path.chmod(0o700)
    made = Wire(f"ipc://{tmp_path}/socket")
    yield made
    made.close()


@pytest.fixture
def client(wire: Wire) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(wire.socket.getsockopt(zmq.LAST_ENDPOINT).decode())  # type: ignore[union-attr]
    socket.send(b"hello")
    assert wire.socket.poll(60_000)
    assert [frame for _, frame in wire.waiting()] == [b"hello"]
    yield socket
    socket.close()
    context.term()


def passed(wire: Wire, seconds: float) -> float:
    began = time.perf_counter()
    wire.await_frame(seconds)
    return time.perf_counter() - began


def test_a_wait_is_as_long_as_was_asked_for(wire: Wire) -> None:
    times = [passed(wire, 0.3e-3) for _ in range(50)]
    assert min(times) >= 0.3e-3
    assert min(times) < 0.9e-3  # in which a poller could not end


def test_a_frame_ends_a_wait(wire: Wire, client: zmq.Socket[bytes]) -> None:
    for number in range(20):
        sender = threading.Timer(0.01, client.send, [b"%d" % number])
        sender.start()
        began = time.perf_counter()
        frames: list[bytes] = []
        while not frames:
            assert passed(wire, 20) < 10
            frames = [frame for _, frame in wire.waiting()]
        assert frames == [b"%d" % number]
        assert time.perf_counter() - began < 10
        sender.join()


def test_a_frame_that_has_come_before_ends_a_wait(wire: Wire, client: zmq.Socket[bytes]) -> None:
    client.send(b"a")
    assert wire.socket.poll(60_000)
    assert passed(wire, 20) < 10
    assert [frame for _, frame in wire.waiting()] == [b"a"]


class PutOff:
    """A service whose first step is due in half a second, and each other 50 ms after the one before; it ends the loop
    after three."""

    patience = 0.0

    def __init__(self, end: int) -> None:
        self._end = end
        self._due = time.monotonic() + 0.5
        self.events: list[tuple[str, float]] = []
        self.asked = 0

    @property
    def delay(self) -> float:
        self.asked += 1
        return max(0.0, self._due - time.monotonic())

    def receive(self, client: bytes, frame: bytes) -> None:
        self.events.append(("frame", time.monotonic()))

    def step(self) -> None:
        assert time.monotonic() >= self._due
        self._due = time.monotonic() + 0.05
        self.events.append(("step", time.monotonic()))
        if [kind for kind, _ in self.events].count("step") == 3:
            os.write(self._end, b"!")

    def report(self) -> None:
        pass


class Ended:
    def __init__(self) -> None:
        reading, self.writing = os.pipe()
        self.descriptors = (reading,)

    def is_asked(self, readable: int) -> bool:
        return True


def test_frames_are_taken_while_a_step_is_put_off(wire: Wire, client: zmq.Socket[bytes]) -> None:
    ending: Any = Ended()
    service: Any = PutOff(ending.writing)
    sender = threading.Timer(0.01, client.send, [b"a"])
    sender.start()
    serve(service, wire, ending)
    sender.join()
    assert [kind for kind, _ in service.events] == ["frame", "step", "step", "step"]
    assert service.asked < 30  # it sleeps
