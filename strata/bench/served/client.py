"""A client of the engine in this process: it sends a load's requests at their times and notes when tokens come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from strata.bench.load.arrivals import arrival_times
from strata.bench.load.request_sets import TEMPERATURE, Ask, Lengths, RandomSet
from strata.bench.workloads import LARGEST_ID
from strata.engine.build import Engine
from strata.engine.process.messages import Add, Fault, FromEngine, Hello, Refused, Step
from strata.engine.process.service import Service

_NAME = b"load"
# The system wakes a sleeper this much too late, in seconds; the rest of a wait is spent awake.
_OVERSLEEP = 0.0005


@dataclass(frozen=True)
class Load:
    """asks: what is asked, prompts as ids. due: seconds from the start at which each of them comes, rising."""

    asks: Sequence[Ask]
    due: Sequence[float]


@dataclass(frozen=True)
class ClientRequest:
    """One request by the engine's clock. due: when it was to come. times: when each token was delivered, so far."""

    due: float
    times: tuple[float, ...]


def random_load(lengths: Lengths, requests: int, rate: float, seed: int, vocabulary: int) -> Load:
    """What `strata bench serve` sends with a seed of `load_seeds`: Poisson arrivals of random prompts.

    rate: requests a second. vocabulary: ids are drawn from its first `LARGEST_ID`, where a server's client draws them
    from those that its tokenizer makes of words.
    """
    ids = range(min(LARGEST_ID, vocabulary))
    return Load(RandomSet(lengths, ids).asks(requests, seed), arrival_times(requests, rate, 1.0, seed))


class ServedEngine:
    """An engine that is served in this process: by the `Service` of an engine process, with its messages as frames.

    What is left out is what lies beyond it: the socket, the API process and HTTP.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._clock = engine.loop.clock
        self._params = engine.default_params
        self._told: list[tuple[float, bytes]] = []
        self._service = Service(engine, model, self._note, log=lambda line: None)
        self._encode = msgspec.msgpack.Encoder().encode

    def serve(self, load: Load, salt: str, until: Callable[[], bool] = lambda: False) -> list[ClientRequest]:
        """Send every request when it is due, until all have ended, or `until` says that it is enough.

        salt: requests of another share no cached prefix with these. Raises RuntimeError for a request that failed.
        """
        frames = [
            self._encode(self._add(str(number), ask, at, salt))
            for number, (ask, at) in enumerate(zip(load.asks, load.due, strict=True))
        ]
        self._restart()
        service, clock, sent = self._service, self._clock, 0
        start = clock()
        due = [start + at for at in load.due]
        while (sent < len(due) or not service.patience) and not until():
            while sent < len(due) and due[sent] <= clock():
                service.receive(_NAME, frames[sent])
                sent += 1
            delay = service.delay
            if delay:
                _wait(min(delay, due[sent] - clock()) if sent < len(due) else delay)
                continue
            service.step()
            service.report()
            if service.patience and sent < len(due):
                _wait(due[sent] - clock())
        stopped = sent < len(due) or not service.patience
        times = delivery_times(self._told, len(due))
        self._restart()
        for number, (ask, found) in enumerate(zip(load.asks, times, strict=True)):
            if not stopped and len(found) != ask.output_tokens:
                raise RuntimeError(f"request {number} of the load got {len(found)} of {ask.output_tokens} tokens")
        return [ClientRequest(at, tuple(found)) for at, found in zip(due, times, strict=True)]

    def _add(self, id: str, ask: Ask, due: float, salt: str) -> Add:
        assert isinstance(ask.prompt, list)
        params = replace(self._params, temperature=TEMPERATURE, max_tokens=ask.output_tokens, ignore_eos=True)
        prompt = [token for token in ask.prompt if isinstance(token, int)]
        return Add(id, prompt, params, arrival=due, salt=salt)

    def _restart(self) -> None:
        """End what the client has not been answered to the end, and forget what it was told."""
        self._service.receive(_NAME, self._encode(Hello()))
        while not self._service.patience:
            self._service.step()
        self._told.clear()

    def _note(self, client: bytes, frame: bytes) -> bool:
        self._told.append((self._clock(), frame))
        return True


def delivery_times(told: Iterable[tuple[float, bytes]], requests: int) -> list[list[float]]:
    """When each token of each request was delivered, from the frames of an engine and their times.

    Raises RuntimeError for a request that was refused or failed, and for an engine that has broken down.
    """
    times: list[list[float]] = [[] for _ in range(requests)]
    decode = msgspec.msgpack.Decoder[FromEngine](FromEngine).decode
    for at, frame in told:
        message = decode(frame)
        if isinstance(message, Step):
            for delta in message.deltas:
                if delta.error is not None:
                    raise RuntimeError(f"request {delta.id} of the load failed: {delta.error}")
                times[int(delta.id)] += [at] * len(delta.tokens)
        elif isinstance(message, Refused):
            raise RuntimeError(f"request {message.id} of the load was refused: {message.message}")
        elif isinstance(message, Fault):
            raise RuntimeError(f"the engine failed under the load: {message.message}")
    return times


def _wait(seconds: float) -> None:
    end = time.perf_counter() + seconds
    if seconds > _OVERSLEEP:
        time.sleep(seconds - _OVERSLEEP)
    while time.perf_counter() < end:
        pass
