"""The engine process: `python -m strata.engine.process.worker`, with its configuration as JSON on standard input.

The line is an object: `address` ("ipc://FOLDER/NAME", in a folder of mode 0700), the fields of `EngineConfig`, and for
tests `check` (verify the scheduler's books whenever the engine comes to rest). Standard input stays open as long as the
process is wanted; at its end, or at SIGTERM, the process ends with exit code 0. What cannot be honoured is reported in
one message on standard error, with exit code 1; so is a fault of the engine, after its clients have been sent it.
"""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from strata.engine.build import build_engine
from strata.engine.engine_config import EngineConfig
from strata.engine.faults import EngineFault
from strata.engine.lifeline import Ending, end_with_parent
from strata.engine.process.service import Service
from strata.engine.startup.option_names import as_flags

# How long last words to clients may take, in milliseconds.
LINGER_MS = 1000


class Wire:
    """The socket that clients connect to.

    What is sent waits without limit for clients that read slowly: the engine must neither wait for one nor lose a frame
    of another. It does not grow without bound, because an API process merges what its own readers leave lying, and one
    that stands still has only so many requests.
    """

    def __init__(self, address: str) -> None:
        """Raises ValueError if the address cannot be used, or anybody else could."""
        folder = Path(address.removeprefix("ipc://")).parent
        if not address.startswith("ipc:///") or not folder.is_dir():
            raise ValueError(
                f"address {address!r} is not ipc:// and the absolute path of a file in a folder that exists"
            )
        if folder.stat().st_mode & 0o077:
            raise ValueError(f"the folder of the engine's socket is open to others: chmod 700 {folder}")
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise ValueError(f"the engine cannot listen at {address}: {error}") from None

    def send(self, client: bytes, frame: bytes) -> bool:
        """Returns whether the client is still there."""
        try:
            self.socket.send_multipart((client, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def await_frame(self, seconds: float) -> None:
        """Return when a frame has come, or so many seconds have passed. A poller would count whole milliseconds."""
        if not self._has_frame():  # the descriptor tells of each change once
            select.select([int(self.socket.getsockopt(zmq.FD))], [], [], seconds)

    def waiting(self) -> Iterator[tuple[bytes, bytes]]:
        """The frames that have come, each with its client."""
        while self._has_frame():
            client, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            yield client, frames[0] if len(frames) == 1 else b""

    def _has_frame(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


def serve(service: Service, wire: Wire, ending: Ending) -> None:
    """Step while there is work, wait for messages while there is none, until asked to end."""
    poller = zmq.Poller()
    for source in (wire.socket, *ending.descriptors):
        poller.register(source, zmq.POLLIN)
    while True:
        for source, _ in poller.poll(int(1000 * service.patience)):
            if source is not wire.socket and ending.is_end_requested(source):
                return
        for client, frame in wire.waiting():
            service.receive(client, frame)
        delay = service.delay
        if delay:
            wire.await_frame(delay)
            continue
        service.step()
        service.report()


def main() -> int:
    end_with_parent()
    given: list[str] = []  # options, as the command line that started this process has them
    try:
        options: dict[str, Any] = msgspec.json.decode(sys.stdin.buffer.readline(), type=dict[str, Any])
        wire = Wire(options.pop("address", ""))
        check = options.pop("check", False)
        model = options.pop("model", None)
        given += options
        config = EngineConfig.from_options(model, options)
        engine = build_engine(config, log=lambda line: _log(as_flags(line, given)))
    except (ValueError, msgspec.MsgspecError, EngineFault) as error:
        _log(as_flags(f"strata: error: {error}", given))
        return 1
    service = Service(engine, config.model, wire.send, _log, check)
    code, last_words = 0, "the engine has been told to end"
    try:
        serve(service, wire, Ending())
    except EngineFault as fault:
        code, last_words = 1, as_flags(str(fault), given)
    except Exception as error:
        traceback.print_exc()
        code, last_words = 1, f"the engine has failed: {error!r}"
    if code:
        _log(f"strata: error: {last_words}")
    service.fail(last_words.partition("\n")[0])
    wire.close()
    if code and engine.ranks is not None:
        os._exit(code)  # the device may wait for a rank that has ended, and an orderly end would wait for the device
    return code


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
