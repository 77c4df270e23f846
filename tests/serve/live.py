"""A server that is whole but for the launcher: an engine process, and uvicorn in a thread of this one."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from strata.serve.client import EngineClient
from strata.serve.http.app import build_app
from strata.serve.http.gate import Gate
from strata.serve.http.keys import KeyHash, KeyRing
from strata.serve.http.limits import Limits
from strata.serve.observe.metrics import Metrics
from strata.serve.processes.drain import Drain
from strata.serve.settings import ServeSettings
from strata.serve.state import ServerState
from strata.text.tokenizer import Tokenizer
from tests.serve.running import NO_LIMITS, PATIENCE

NAME = "builtin"


class LiveServer:
    """url: where it listens. state: what its handlers share; belongs to the server's thread."""

    def __init__(self, url: str, state: ServerState, engine: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.state = state
        self.engine = engine
        self.client = httpx.Client(base_url=url, timeout=60, limits=NO_LIMITS)

    def post(self, path: str, **body: Any) -> Any:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing to do and holds no pages."""
        statistics = self.state.client.statistics
        return statistics.running == 0 and statistics.waiting == 0 and self.state.limits.in_flight == 0

    def wait_until(self, condition: Callable[[], bool], seconds: float = PATIENCE) -> float:
        """Seconds until it held."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, "it did not come to pass"
            time.sleep(0.01)
        return time.monotonic() - start


@contextmanager
def live_server(
    folder: Path, keys: Sequence[KeyHash] = (), engine_options: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[LiveServer]:
    """Serves the model in `folder`. engine_options: of EngineConfig; settings: of ServeSettings."""
    with tempfile.TemporaryDirectory(prefix="strata-") as private:
        address = f"ipc://{private}/engine.sock"
        job = {"address": address, "model": str(folder), "device": "cpu", "check": True, **(engine_options or {})}
        with subprocess.Popen([sys.executable, "-m", "strata.engine.process.worker"], stdin=subprocess.PIPE) as engine:
            assert engine.stdin is not None
            engine.stdin.write(json.dumps(job).encode() + b"\n")
            engine.stdin.flush()
            try:
                with _serving(ServeSettings(str(folder), (NAME,), **settings), address, keys) as (url, state):
                    yield LiveServer(url, state, engine)
            finally:
                engine.kill()


@contextmanager
def _serving(settings: ServeSettings, address: str, keys: Sequence[KeyHash]) -> Iterator[tuple[str, ServerState]]:
    states: list[ServerState] = []

    async def connect() -> ServerState:
        client = await EngineClient.connect(address, timeout=PATIENCE)
        states.append(
            ServerState(
                settings=settings,
                client=client,
                tokenizer=Tokenizer.load(settings.model),
                limits=Limits(settings, client.ready.max_sequences, callers=len(keys)),
                metrics=Metrics(NAME),
            )
        )
        return states[0]

    gate = Gate(
        build_app(settings, connect),
        settings,
        KeyRing(keys),
        Drain(),
        lambda caller: states[0].limits.enter(caller),
        lambda why: states[0].metrics.rejected(why),
    )
    with in_thread(gate) as url:
        yield url, states[0]


@contextmanager
def in_thread(application: Gate) -> Iterator[str]:
    """Where an application listens, once it is ready."""
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="on"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            assert httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 200
            yield url
        finally:
            server.should_exit = True
            thread.join()
