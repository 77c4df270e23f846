"""The life of a server: its processes start, serve, drain and end together, and none outlives the others."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import math
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from strata.serve.client import EngineClient, EngineGone
from strata.serve.engine_ends import EngineEnds
from strata.serve.event_loop import new_event_loop
from strata.serve.http.keys import KeySource
from strata.serve.observe.logs import configure_logging, log_event
from strata.serve.processes.api_processes import ApiProcesses
from strata.serve.processes.child import Child, how_it_ended
from strata.serve.processes.worker import ApiJob, ApiServer, engine_address
from strata.text.tokenizer import has_chat_template

ENGINE_MODULE = "strata.engine.process.worker"
# After the engine's death, so that whoever asks for /health sees it before connections are refused.
_NOTICE_SECONDS = 2.0
_ENGINE_STOP_SECONDS = 5.0

_log = logging.getLogger("strata.serve")
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def launch(asked: ApiJob, engine: Mapping[str, Any], keys: KeySource) -> int:
    """Run a server until a signal ends it. Returns the exit status: 0, or 1 if the engine died or did not start.

    asked: of the API processes, but for what the launcher decides. engine: fields of EngineConfig by name. keys: where
    those of `asked` are from; at SIGHUP they are read again.
    Raises ValueError if it cannot listen, or cannot serve the model.
    """
    configure_logging(asked.settings.log_json)
    _allow_many_connections()
    with ExitStack() as closing:
        listeners = [closing.enter_context(bind(asked.settings.host, asked.settings.port))]
        if asked.settings.metrics_port is not None:
            metrics = closing.enter_context(bind(asked.settings.host, asked.settings.metrics_port, "--metrics-port"))
            host, port = metrics.getsockname()[:2]
            if port == listeners[0].getsockname()[1]:
                raise ValueError(f"{host}:{port} is where all else is served: choose another --metrics-port")
            listeners.append(metrics)
            settings = dataclasses.replace(asked.settings, metrics_port=port)
            asked = msgspec.structs.replace(asked, settings=settings)
        folder = Path(tempfile.mkdtemp(prefix="strata-"))  # mode 0700
        asked = msgspec.structs.replace(asked, folder=str(folder))
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                return runner.run(_Launcher(asked, engine, keys, listeners).run())
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket that has the address but does not listen yet. Raises ValueError if it cannot have it. option: that gave
    the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"--host {host} cannot be used: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(
                f"--host {host} is no address of this machine: leave it out for 127.0.0.1, or give 0.0.0.0 for all of "
                "its addresses"
            ) from None
        raise ValueError(f"{host}:{port} cannot be listened on ({error.strerror}): choose another {option}") from None
    return listener


def _allow_many_connections() -> None:
    """Each connection is an open file, and a shell allows few of them; children inherit what this one may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Launcher:
    def __init__(
        self, asked: ApiJob, engine: Mapping[str, Any], keys: KeySource, listeners: Sequence[socket.socket]
    ) -> None:
        self._asked, self._engine_fields = asked, engine
        self._keys, self._key_names = keys, {key.name for key in asked.keys}
        self._listeners = listeners
        self._folder = Path(asked.folder)
        self._api = ApiServer(asked) if asked.settings.api_workers == 1 else ApiProcesses(asked)
        self._signalled = asyncio.Event()
        options = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
        ranks = math.prod(engine.get(option, 1) for option in options)
        device = engine.get("device", "auto")
        self._devices = engine_devices(asked.settings.data_parallel_size, ranks, device, os.environ)
        self._engines: list[Child] = []
        self._ends = EngineEnds(self._folder)
        self._gone: set[int] = set()  # replicas whose engine has ended and gets no successor
        self._replacing: dict[int, asyncio.Task[bool]] = {}

    async def run(self) -> int:
        start = time.monotonic()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._read_keys)
        self._on_signals(lambda _: self._signalled.set())
        self._engines = [await self._start_engine(replica) for replica in range(len(self._devices))]
        self._on_signals(self._on_signal)
        try:
            if not await self._start_api():
                return 0 if self._signalled.is_set() else 1
            print(greeting(self._asked, self._listeners[0].getsockname(), time.monotonic() - start), flush=True)
            return await self._watch()
        finally:
            for replacing in self._replacing.values():
                replacing.cancel()
            await asyncio.gather(*(engine.stop(_ENGINE_STOP_SECONDS) for engine in self._engines))

    def _on_signals(self, handle: Callable[[int], None]) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, handle, number)

    def _read_keys(self) -> None:
        """Have the API processes take the keys that the file has now; if it is wrong, they keep what they have."""
        if self._keys.file is None:
            _log.warning("there is no --api-key-file to be read again: the API keys stay as they are")
            return
        try:
            keys = self._keys.read()
        except ValueError as error:
            _log.error("the API keys stay as they are: %s", error)
            return
        self._api.set_keys(keys)
        before, self._key_names = self._key_names, {key.name for key in keys}
        new, gone = (",".join(sorted(names)) or None for names in (self._key_names - before, before - self._key_names))
        log_event(_log, "the API keys were read again", keys=len(keys), new=new, gone=gone)

    def _on_signal(self, number: int) -> None:
        """The first signal ends the server in good order, the second at once; API processes end with this one."""
        if self._signalled.is_set():
            for engine in self._engines:
                engine.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(128 + number)
        self._signalled.set()

    async def _start_engine(self, replica: int) -> Child:
        job = {"address": engine_address(self._folder, replica), **self._engine_fields}
        engine = await Child.start(ENGINE_MODULE, msgspec.json.encode(job), environment=self._devices[replica])
        self._ends.begin(engine.pid)
        return engine

    async def _start_api(self) -> bool:
        """Whether requests are served now; if not, a signal ended the server, or the engine did not start."""
        starting = asyncio.create_task(self._api.start(self._listeners))
        ended = [engine.ended for engine in self._engines]
        await self._any_of(starting, *ended)
        if not starting.done():
            starting.cancel()
        try:
            await starting
        except (EngineGone, asyncio.CancelledError):
            if not self._signalled.is_set():
                await asyncio.wait(ended, timeout=_ENGINE_STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for engine in self._engines:
                    _explain(engine)
            return False
        return True

    async def _watch(self) -> int:
        """Until a signal ends the server, or it cannot go on."""
        while len(self._gone) < len(self._engines):
            up = [replica for replica in range(len(self._engines)) if replica not in {*self._gone, *self._replacing}]
            ended = [self._engines[replica].ended for replica in up]
            await self._any_of(*ended, *self._replacing.values(), self._api.ended)
            if self._signalled.is_set():
                _log.info("no new requests are taken; those under way get %g s", self._asked.settings.shutdown_timeout)
                await self._api.drain(self._asked.settings.shutdown_timeout)
                return 0
            if self._api.ended.done():
                return 1
            self._note_replaced()
            for replica in up:
                self._note_ended(replica)
        await self._any_of(asyncio.create_task(asyncio.sleep(_NOTICE_SECONDS)))
        await self._api.drain(_NOTICE_SECONDS)
        return 0 if self._signalled.is_set() else 1

    def _note_ended(self, replica: int) -> None:
        """If its engine has ended, begin to start another, or give the replica up."""
        engine = self._engines[replica]
        if not engine.ended.done():
            return
        engine.kill()  # what it may have started
        which = f" of replica {replica}" if len(self._engines) > 1 else ""
        said = f"the engine process{which} {how_it_ended(engine.ended.result())}"
        self._ends.tell(engine.pid, said)
        _log.error("%s", said)
        if self._asked.restart_engine:
            self._replacing[replica] = asyncio.create_task(self._replace_engine(replica))
        else:
            self._gone.add(replica)

    def _note_replaced(self) -> None:
        for replica, replacing in list(self._replacing.items()):
            if replacing.done():
                del self._replacing[replica]
                if not replacing.result():
                    self._gone.add(replica)

    async def _replace_engine(self, replica: int) -> bool:
        """Whether another engine is ready. One that dies before it is would do so again, and gets no successor."""
        _log.info("another engine is started")
        engine = self._engines[replica] = await self._start_engine(replica)
        connecting = asyncio.create_task(EngineClient.connect(engine_address(self._folder, replica)))
        await self._any_of(connecting, engine.ended, self._api.ended)
        if connecting.done() and connecting.exception() is None:
            await connecting.result().close()
            return True
        connecting.cancel()
        _explain(engine)
        return False

    async def _any_of(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait until one of them is done, or a signal ends the server."""
        signalled = asyncio.create_task(self._signalled.wait())
        await asyncio.wait((signalled, *tasks), return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()


def _explain(engine: Child) -> None:
    """Say why an engine is not there, unless it could say so itself."""
    if engine.ended.done() and engine.ended.result() <= 0:
        _log.error("the engine process %s", how_it_ended(engine.ended.result()))


def greeting(asked: ApiJob, address: tuple[Any, ...], seconds: float) -> str:
    """Where the server is, and how to ask it something."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    url = f"http://{host}:{address[1]}"
    name = asked.settings.served_model_names[0]
    key = " -H 'Authorization: Bearer <key>'" if asked.keys else ""
    prompt: dict[str, Any] = {"prompt": "47 + 38 ="}
    route = "completions"
    if asked.settings.chat_template is not None or has_chat_template(asked.tokenizer):
        prompt = {"messages": [{"role": "user", "content": "What is 47 + 38?"}]}
        route = "chat/completions"
    question = json.dumps({"model": name, **prompt})
    metrics = asked.settings.metrics_port
    open_metrics = "" if metrics is None else f"\nMetrics without a key: http://{host}:{metrics}/metrics"
    return (
        f"Strata serves {name} at {url} (ready in {seconds:.1f} s; Ctrl-C ends it). Try:\n"
        f"curl {url}/v1/{route} -H 'Content-Type: application/json'{key} -d '{question}'{open_metrics}"
    )


def engine_devices(
    engines: int, ranks: int, device: str, environment: Mapping[str, str], files: Path = Path("/dev")
) -> list[dict[str, str]]:
    """Variables of the environment of each engine: GPUs of its own, one for each rank, in order. Nothing where one
    engine has all that there are, or none has any.

    device: the engines' option. files: where the GPUs' device files are; torch, which would count them, takes seconds
        to load and memory to keep. Raises ValueError if there are too few.
    """
    if engines == 1 or device == "cpu":
        return [{}] * engines
    if device.startswith("cuda:"):
        raise ValueError(
            f"device {device!r} is one GPU, data_parallel_size={engines} needs one for each engine: give cuda, and "
            f"choose among GPUs by the environment variable {_VARIABLE}"
        )
    listed = environment.get(_VARIABLE)
    if listed is None:
        found = sorted(int(file.name[6:]) for file in files.glob("nvidia[0-9]*") if file.name[6:].isdecimal())
        names = [str(at) for at in range(len(found))]
    else:
        names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names and device == "auto":
        return [{}] * engines
    if len(names) < engines * ranks:
        raise ValueError(
            f"data_parallel_size={engines} with {ranks} ranks each needs {engines * ranks} GPUs, and there "
            f"are {len(names)}: ask for fewer, or show more by {_VARIABLE}"
        )
    return [{_VARIABLE: ",".join(names[engine * ranks : (engine + 1) * ranks])} for engine in range(engines)]
