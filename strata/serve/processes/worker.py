"""One API process: HTTP on a listening socket, for an engine in another process.

`python -m strata.serve.processes.worker` runs one with an ApiJob as JSON on standard input; it says "ready" on standard
output once it serves. Later lines are lists of keys that open the server from then on. The launcher runs one in itself
when there is to be but one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

import msgspec
import uvicorn

from strata.engine.lifeline import end_with_parent
from strata.serve.client import EngineClient, EngineGone
from strata.serve.engine_ends import EngineEnds
from strata.serve.event_loop import new_event_loop
from strata.serve.fair_queue import AT_ONCE
from strata.serve.http.app import build_app, handlers
from strata.serve.http.errors import ApiError, rejection_of
from strata.serve.http.gate import Gate
from strata.serve.http.http_protocol import bounded
from strata.serve.http.keys import KeyHash, KeyRing
from strata.serve.http.limits import Limits
from strata.serve.observe.handlers import OTHER
from strata.serve.observe.logs import AccessLog, configure_logging, log_refusal
from strata.serve.observe.metrics import Metrics
from strata.serve.observe.tracing import RequestTracer, make_tracer
from strata.serve.processes.drain import Drain
from strata.serve.routing.replicas import ReplicaDrains, Replicas
from strata.serve.settings import ServeSettings
from strata.serve.state import ServerState
from strata.text.chat_template import AsyncTemplateRenderer
from strata.text.tokenizer import Tokenizer

_KEEP_ALIVE_SECONDS = 30  # of a connection between two requests
_FLUSH_SECONDS = 2  # in which clients are to take their last words
# After which a thread that tokenizes gets the interpreter from the one that writes streams; by default 5 ms,
# twice in the time to first token of a chat.
SWITCH_SECONDS = 2e-4
READY = "ready"
_BACKLOG = 2048  # connections that the kernel holds until they are accepted

_log = logging.getLogger("strata.serve")


class ApiJob(msgspec.Struct, frozen=True):
    """What an API process is to do.

    tokenizer: its folder.
    restart_engine: another engine is started when one has ended, and is connected to.
    traces_endpoint: where OpenTelemetry's traces go, None for nowhere.
    folder: private to the server; the engine's socket and the processes' metrics are in it.
    number: of this process.
    listeners: descriptors of the listening sockets that it has inherited, if it is a process of its own.
    """

    settings: ServeSettings
    keys: list[KeyHash]
    tokenizer: str
    restart_engine: bool = False
    traces_endpoint: str | None = None
    folder: str = ""
    number: int = 0
    listeners: tuple[int, ...] = ()


def engine_address(folder: Path, replica: int = 0) -> str:
    """Where an engine of the server whose private folder this is takes requests."""
    return f"ipc://{folder}/engine-{replica}.sock"


def listen(listener: socket.socket) -> None:
    """Listen at the address that a socket has. Raises ValueError if another process has come to listen there since."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        message = f"{host}:{port} cannot be listened on any more ({error.strerror}): choose another port"
        raise ValueError(message) from None


class ApiServer:
    """An API process's work, from `start` to `drain`."""

    def __init__(self, job: ApiJob) -> None:
        self._job = job
        replicas = range(job.settings.data_parallel_size)
        self._addresses = [engine_address(Path(job.folder), replica) for replica in replicas]
        self._ends = EngineEnds(Path(job.folder))
        self._drain = Drain()
        self._keys = KeyRing(job.keys)
        self._limits: Limits | None = None  # until the engine is ready

    def set_keys(self, keys: Sequence[KeyHash]) -> None:
        """The keys that open the server from now on; what is under way goes on."""
        self._keys.replace(keys)
        if self._limits is not None:
            self._limits.set_callers(len(keys))

    async def start(self, listeners: Sequence[socket.socket]) -> None:
        """Wait until the engine is ready, then serve; returns once connections are accepted.

        Raises EngineGone, or ValueError for a model that cannot be served and an address that is taken.
        """
        tracer = make_tracer(self._job.traces_endpoint, self._job.settings.served_model_names[0])
        self._app = build_app(self._job.settings, self._connected)
        self._handlers = handlers(self._app)
        self._state = await self._connect()
        for listener in listeners:
            listen(listener)
        self._server = _Server(self._application(tracer))
        self.ended = asyncio.create_task(self._server.serve(list(listeners)))
        again = self._addresses if self._job.restart_engine else ()
        self._connecting = [asyncio.create_task(self._connect_again(replica)) for replica in range(len(again))]
        accepting = asyncio.create_task(self._server.accepting.wait())
        await asyncio.wait((accepting, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            self.ended.result()
        sys.setswitchinterval(SWITCH_SECONDS)
        # What there is now stays. To look through it, every full collection would stop all streams for 30 ms.
        gc.collect()
        gc.freeze()

    async def drain(self, seconds: float) -> None:
        """Take no new requests, give those under way so much time, end what is left with an error, and stop."""
        self._drain.begun = self._state.draining = True
        if not await self._drain.wait(seconds):
            _log.warning("%d requests are ended: they did not finish in %g s", self._drain.under_way, seconds)
            await self._state.client.close()
            await self._drain.wait(_FLUSH_SECONDS)
        for connecting in self._connecting:
            connecting.cancel()
        self._server.should_exit = True
        await self.ended

    async def _connect(self) -> ServerState:
        job, settings = self._job, self._job.settings
        tokenizer = await asyncio.to_thread(Tokenizer.load, job.tokenizer, settings.chat_template)
        renderers = [AsyncTemplateRenderer() for _ in range(AT_ONCE)]
        with suppress(ValueError):  # there may be no template, or none that takes this
            # Starts the process that renders, while the engine starts, too; the first chat would wait for it.
            hello = tokenizer.rendering([{"role": "user", "content": "Hello"}])
            await asyncio.gather(*(renderer.render(hello) for renderer in renderers))
        client = await self._clients()
        self._limits = Limits(settings, client.ready.max_sequences, callers=len(self._keys))
        return ServerState(
            settings=settings,
            client=client,
            tokenizer=tokenizer,
            limits=self._limits,
            metrics=Metrics(
                settings.served_model_names[0],
                Path(job.folder),
                job.number,
                len(self._addresses),
                self._handlers.names,
            ),
            renderers=renderers,
            engine_restarts=job.restart_engine,
        )

    async def _connected(self) -> ServerState:
        return self._state

    def _application(self, tracer: RequestTracer | None) -> uvicorn.Config:
        state, settings = self._state, self._job.settings
        gate = Gate(self._app, settings, self._keys, self._drain, state.limits.enter, state.metrics.rejected)

        def answered(method: str, path: str, status: int | None) -> None:
            state.metrics.answered(self._handlers.place(method, path), status)

        return uvicorn.Config(
            AccessLog(gate, log_prompts=settings.log_prompts, tracer=tracer, answered=answered),
            http=bounded(self._refused),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )

    def _refused(self, error: ApiError) -> None:
        """What is no request that a route could take is counted and logged, too."""
        self._state.metrics.answered(self._handlers.names.index(OTHER), error.status)
        if (reason := rejection_of(error)) is not None:
            self._state.metrics.rejected(reason)
        log_refusal(error.status, error.word)

    async def _clients(self) -> EngineClient | Replicas:
        silence = self._job.settings.engine_timeout
        if len(self._addresses) > 1:
            drains = ReplicaDrains(len(self._addresses), Path(self._job.folder))
            return await Replicas.connect(self._addresses, silence_timeout=silence, drains=drains, ends=self._ends)
        return await EngineClient.connect(self._addresses[0], silence_timeout=silence, ends=self._ends)

    async def _connect_again(self, replica: int) -> None:
        state, silence = self._state, self._job.settings.engine_timeout
        while True:
            client = state.client
            one = client.clients[replica] if isinstance(client, Replicas) else client
            await one.wait_dead()
            state.metrics.engine_ended(one.statistics, replica)
            await one.close()
            try:
                another = await EngineClient.connect(self._addresses[replica], silence_timeout=silence, ends=self._ends)
            except EngineGone as error:
                _log.warning("the new engine is gone: %s", error)
                continue
            if isinstance(client, Replicas):
                client.replace(replica, another)
            else:
                state.client = another
            state.metrics.engine_restarted(replica)
            _log.info("requests are served again")


class _Server(uvicorn.Server):
    """accepting: set once connections are. Signals are left to whoever runs the server."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Serve what the job on standard input says, until SIGTERM, which drains."""
    end_with_parent()
    # Unbuffered: what comes behind the job is left for the event loop to find.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as told:
        job = msgspec.json.decode(told.readline(), type=ApiJob)
        configure_logging(job.settings.log_json)
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(_serve(job, told))
        except (ValueError, EngineGone) as error:
            print(f"strata: error: {error}", file=sys.stderr)
            sys.exit(1)


async def _serve(job: ApiJob, told: FileIO) -> None:
    terminated = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    server = ApiServer(job)

    def hear() -> None:
        line = told.readline()
        if not line:  # the launcher has died
            os._exit(1)
        server.set_keys(msgspec.json.decode(line, type=list[KeyHash]))

    loop.add_reader(told.fileno(), hear)
    with ExitStack() as closing:
        await server.start([closing.enter_context(socket.socket(fileno=one)) for one in job.listeners])
        print(READY, flush=True)
        await terminated.wait()
        await server.drain(job.settings.shutdown_timeout)


if __name__ == "__main__":
    main()
