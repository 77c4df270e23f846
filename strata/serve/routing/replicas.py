"""An API process's lines to several replicas of an engine, which are used as if they were one `EngineClient`."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from strata.engine.process.messages import Add, Delta, Embed, Ready, Statistics, TokenLogprobs
from strata.engine.routing.router import NoReplica, ReplicaState, Route, Router
from strata.engine.watch.request_ledger import RequestLedger
from strata.serve.client import EngineClient, EngineGone
from strata.serve.engine_ends import EngineEnds

# After this an engine has told of all that it was sent before it was drained: it tells twice a second.
_SETTLED_SECONDS = 1.0


class ReplicaStream:
    """What one request brings, as `Stream`. If its replica is lost before anything came, another one gets the request;
    once something has been read, an answer begun anew could contradict it, so EngineGone is raised."""

    def __init__(self, replicas: Replicas, add: Add) -> None:
        """Raises NoReplica."""
        self.id = add.id
        self._replicas = replicas
        self._add = add
        self._begun = self._expired = False
        self._route = replicas.router.route(add.prompt, add.salt, samples=add.params.n, caches=_caches(add))
        self._stream = self.client.submit(add)

    @property
    def client(self) -> EngineClient:
        """Of the replica that has the request."""
        return self._replicas.clients[self._route.replica]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        return self._stream.prompt_logprobs

    def __aiter__(self) -> ReplicaStream:
        return self

    async def __anext__(self) -> list[Delta]:
        while True:
            try:
                deltas = await anext(self._stream)
            except EngineGone as error:
                self._move(error)
                continue
            except Exception:
                self._replicas._forget(self.id, self._route)
                raise
            if not self._begun:
                self._begun = True
                self._replicas.router.begun(self._route)
            return deltas

    def expire(self) -> None:
        """As of `Stream`."""
        self._expired = True
        self._stream.expire()

    async def aclose(self) -> None:
        """As of `Stream`."""
        await self._stream.aclose()
        self._replicas._forget(self.id, self._route)

    def _move(self, error: EngineGone) -> None:
        """Ask another replica. Raises `error` if it is too late for that, or there is none."""
        add, route = self._add, self._route
        self._replicas._look()
        self._replicas.router.ended(route)
        try:
            if self._begun or self._expired:
                raise error
            router = self._replicas.router
            self._route = router.reroute(route, add.prompt, add.salt, samples=add.params.n, caches=_caches(add))
        except (EngineGone, NoReplica):
            self._replicas._forget(self.id, route)
            raise error from None
        self._stream = self.client.submit(add)


class Replicas:
    """Clients of N engines that serve the same model, with the methods of `EngineClient` that requests use.

    A replica whose engine has ended is lost until `replace` gives it another.

    ready: what the engines are together: their sequences and pages in sum, and the length that all of them take.
    alive: whether any of them lives.
    """

    def __init__(self, clients: Sequence[EngineClient], drains: ReplicaDrains | None = None) -> None:
        """clients: connected, at least one. drains: shared with other API processes, if there are any."""
        self.clients = list(clients)
        self._drains = drains or ReplicaDrains(len(self.clients))
        self._drained_since = [0.0] * len(self.clients)  # when this process has seen it, in seconds of a clock
        self.router = Router(client.ready.num_pages * client.ready.page_size for client in clients)
        self._reported: list[Statistics | None] = [None] * len(self.clients)
        self._streams: dict[str, ReplicaStream] = {}

    @classmethod
    async def connect(
        cls,
        addresses: Sequence[str],
        *,
        silence_timeout: float = 0.0,
        drains: ReplicaDrains | None = None,
        ends: EngineEnds | None = None,
    ) -> Replicas:
        """Wait until all engines are ready. Raises EngineGone if one of them is not to be; parameters as of
        `EngineClient.connect` and of `Replicas`."""
        connecting = [
            asyncio.create_task(EngineClient.connect(address, silence_timeout=silence_timeout, ends=ends))
            for address in addresses
        ]
        try:
            return cls(await asyncio.gather(*connecting), drains)
        except BaseException:
            for task in connecting:
                task.cancel()
            made = await asyncio.gather(*connecting, return_exceptions=True)
            await asyncio.gather(*(client.close() for client in made if isinstance(client, EngineClient)))
            raise

    @property
    def ready(self) -> Ready:
        each = [client.ready for client in self.clients]
        return msgspec.structs.replace(
            each[0],
            max_model_len=min(ready.max_model_len for ready in each),
            max_sequences=sum(ready.max_sequences for ready in each),
            num_pages=sum(ready.num_pages for ready in each),
        )

    @property
    def each_statistics(self) -> tuple[Statistics, ...]:
        """How each engine stands; what it has counted is since its own start."""
        return tuple(statistics for client in self.clients for statistics in client.each_statistics)

    @property
    def alive(self) -> bool:
        return any(client.alive for client in self.clients)

    @property
    def cause(self) -> str:
        """Why none of them is alive, as far as that is known."""
        return ", ".join(dict.fromkeys(client.cause for client in self.clients))

    @property
    def takes_requests(self) -> bool:
        """Whether any of them is neither lost nor drained."""
        self._look()
        return any(self.router.standing(replica) is ReplicaState.SERVING for replica in range(len(self.clients)))

    def standing(self, replica: int) -> ReplicaState:
        self._look()
        return self.router.standing(replica)

    def drain(self, replica: int) -> None:
        """Let a replica finish what it has and take no new requests, whatever API process has them.

        Raises LastReplica if no other one would take requests.
        """
        others = [other for other, client in enumerate(self.clients) if client.alive and other != replica]
        self._drains.drain(replica, others)

    def resume(self, replica: int) -> None:
        """Let it take requests again."""
        self._drains.resume(replica)

    def has_drained(self, replica: int) -> bool:
        """Whether a replica that drains has nothing left, by what it has told since all processes know."""
        if self.standing(replica) is not ReplicaState.DRAINING or self.router.under_way(replica):
            return False
        told = self.clients[replica].statistics
        return time.monotonic() - self._drained_since[replica] > _SETTLED_SECONDS and not told.running + told.waiting

    async def close(self) -> None:
        """Abort all requests and end the connections. Safe to call twice."""
        await asyncio.gather(*(client.close() for client in self.clients))

    def replace(self, replica: int, client: EngineClient) -> None:
        """Another engine serves in the place of one that has ended, whose client is closed."""
        self._look()
        self.clients[replica] = client
        self._reported[replica] = None
        self.router.recover(replica)

    def submit(self, add: Add) -> ReplicaStream:
        """Ask one of the replicas for a generation. Raises ValueError if the id is that of an unfinished request, and
        EngineGone if no replica takes requests."""
        if add.id in self._streams:
            raise ValueError(f"request id {add.id!r} is in use by an unfinished request: choose another")
        self._look()
        try:
            stream = self._streams[add.id] = ReplicaStream(self, add)
        except NoReplica as error:
            raise EngineGone(str(error)) from None
        return stream

    async def embed(self, request: Embed) -> list[float]:
        """One vector; errors as of `EngineClient.embed`. Another replica is asked when the first is lost."""
        route: Route | None = None
        while True:
            self._look()
            try:
                if route is None:
                    route = self.router.route(request.prompt, samples=0, caches=False)
                else:
                    route = self.router.reroute(route, request.prompt, samples=0, caches=False)
            except NoReplica as error:
                raise EngineGone(str(error)) from None
            try:
                return await self.clients[route.replica].embed(request)
            except EngineGone:
                continue
            finally:
                self.router.ended(route)

    async def ledgers(self, name: str) -> list[RequestLedger]:
        """As of `EngineClient`, of all engines that answer. Raises EngineGone if none does."""
        living = [client for client in self.clients if client.alive]
        found = await asyncio.gather(*(_ledgers_of(client, name) for client in living))
        answered = [of_one for of_one in found if of_one is not None]
        if not answered:
            raise EngineGone("no engine lives, or none answers")
        return [ledger for of_one in answered for ledger in of_one]

    def finish(self, id: str, index: int, stop: str) -> None:
        """As of `EngineClient`."""
        stream = self._streams.get(id)
        if stream is not None:
            stream.client.finish(id, index, stop)

    def _look(self) -> None:
        """See which engines have ended, and how much load the others tell of."""
        for replica, client in enumerate(self.clients):
            if not client.alive:
                if self.router.standing(replica) is not ReplicaState.LOST:
                    self.router.lose(replica)
                continue
            self._follow_operator(replica)
            told = client.statistics
            if told is not self._reported[replica]:
                self._reported[replica] = told
                self.router.report(replica, prompt_tokens=told.waiting_tokens, samples=told.running + told.waiting)

    def _follow_operator(self, replica: int) -> None:
        drains, standing = self._drains.drains(replica), self.router.standing(replica)
        if drains and standing is ReplicaState.SERVING:
            self.router.drain(replica)
            self._drained_since[replica] = time.monotonic()
        elif not drains and standing is ReplicaState.DRAINING:
            self.router.recover(replica)

    def _forget(self, id: str, route: Route) -> None:
        """A request is over."""
        self.router.ended(route)
        self._streams.pop(id, None)


def _caches(add: Add) -> bool:
    """Whether the engine looks the prompt up in its prefix cache: one whose log-probabilities are asked for is computed
    whole."""
    return add.params.prompt_logprobs is None


async def _ledgers_of(client: EngineClient, name: str) -> list[RequestLedger] | None:
    """None of an engine that ends, or does not answer: those of others are told all the same."""
    try:
        return await client.ledgers(name)
    except EngineGone:
        return None


class LastReplica(ValueError):
    """A replica that may not be drained, since nobody would take requests then; the message says so in one line."""


class ReplicaDrains:
    """A byte for each replica, in a file that the API processes of a server map into their memory: looking costs no
    system call, and a process that is started again finds what was asked of the others."""

    def __init__(self, replicas: int, folder: Path | None = None) -> None:
        """folder: private to the server; None where one process is all there is."""
        self._file = None if folder is None else (folder / "drains").open("a+b")
        if self._file is not None:
            self._file.truncate(replicas)
        self._flags = mmap.mmap(-1 if self._file is None else self._file.fileno(), replicas)

    def drains(self, replica: int) -> bool:
        """Whether it is to take no new requests."""
        return bool(self._flags[replica])

    def drain(self, replica: int, others: Iterable[int]) -> None:
        """Let a replica take no new requests. others: replicas that live.

        Raises LastReplica unless one of those goes on to take requests.
        """
        with self._alone():
            if all(self.drains(other) for other in others):
                raise LastReplica(f"replica {replica} is the last that takes requests: resume another one first")
            self._flags[replica] = 1

    def resume(self, replica: int) -> None:
        """Let it take requests again."""
        with self._alone():
            self._flags[replica] = 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two processes that drain the last two replicas would each see the other one serve."""
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
