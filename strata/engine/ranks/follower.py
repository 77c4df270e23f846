"""A rank of an engine other than the first: `python -m strata.engine.ranks.follower`, which rank 0 starts.

Its standard input is one line of JSON: `rank`, the fields of `engine` (`EngineConfig`), the `port` at which ranks meet,
and the descriptors `channel` and `beats` that it has inherited. It ends with rank 0, whatever becomes of that.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace

import msgspec
import numpy as np
import torch

from strata.comm.mesh import Axis
from strata.engine.embeddings.pooling import Pooled, PoolRequest
from strata.engine.engine_config import EngineConfig
from strata.engine.faults import EngineFault, memory_explained
from strata.engine.grammars.grammar import MasksUnderWay
from strata.engine.lifeline import end_with_parent
from strata.engine.ranks import messages, world
from strata.engine.ranks.heartbeat import Heartbeats
from strata.engine.runner import Launched, Undrawn
from strata.engine.startup.clock import StartupClock, collector_off
from strata.engine.startup.executor import Executor, build_executor
from strata.models import weights

# How long a rank that tells ids waits for a message before it looks at its device again, in seconds.
_LOOK_SECONDS = 2e-5


class _Job(msgspec.Struct):
    engine: EngineConfig
    rank: int
    port: int
    channel: int
    beats: int


class _LeaderGone(Exception):
    """Rank 0 has ended, or has told this one to."""


class Leader:
    """Rank 0 as a follower sees it: what it says, one after the other. A `Rank`."""

    def __init__(self, job: _Job) -> None:
        self.index, self.size = job.rank, job.engine.ranks
        self._asked = job.engine
        self._port = job.port
        self._channel = socket.socket(fileno=job.channel)
        self._frames = messages.Frames(self._channel)
        self._beats = Heartbeats(job.beats)
        os.close(job.beats)
        self._beats.keep_beating(self.index)
        self._encode = messages.encoder()
        self._decode: Callable[[bytes], messages.ToFollower] = messages.decoder(messages.ToFollower)
        self._done = 0

    @property
    def number(self) -> int:
        """Of the message that `next` told last."""
        return self._done

    def next(self, report: Callable[[], bool] = lambda: False) -> messages.ToFollower:
        """Wait for what is to be done next. report: called while nothing comes, as long as it has something to wait
        for. Raises _LeaderGone."""
        waits = report()
        while (frame := self._frames.next()) is None:
            while waits and not select.select([self._channel], [], [], _LOOK_SECONDS)[0]:
                waits = report()
            if not self._frames.receive():
                raise _LeaderGone
        return self._decode(frame)

    def done(self) -> None:
        """What `next` told has been done."""
        self._done += 1
        self._beats.done(self.index, self._done)

    def tell(self, message: messages.ToLeader) -> None:
        self._channel.sendall(messages.framed(self._encode(message)))

    def min_over_ranks(self, value: int) -> int:
        """See `Rank`."""
        self.tell(messages.Value(value))
        agreed = self.next()
        if not isinstance(agreed, messages.Agree):
            raise _LeaderGone
        self.done()
        return agreed.value

    def join(self, device: torch.device) -> dict[str, Axis]:
        """See `Rank`."""
        self.min_over_ranks(0)
        store = world.store_at(self._port, self.size)
        return world.join(store, self.index, self._asked, device)[1]


class _Steps:
    """What rank 0 has told to launch. It is waited for there, or once this rank has told its ids.

    stages: of the pipeline. tells: this rank has ids that rank 0 has not.
    """

    def __init__(self, executor: Executor, leader: Leader, stages: int, *, tells: bool) -> None:
        self._executor, self._runner = executor, executor.runner
        self._leader, self._stages, self._tells = leader, stages, tells
        self._under_way: deque[tuple[int, Launched | Pooled]] = deque()
        self._undrawn: Undrawn | None = None
        self._weight = bytearray()

    def report(self) -> bool:
        """Tell what has ended, if this rank does; whether more will."""
        while self._tells and self._under_way and self._under_way[0][1].ended:
            self._leader.tell(_answer(*self._under_way.popleft()))
        return self._tells and bool(self._under_way)

    def do(self, message: messages.ToFollower) -> int | None:
        """Do it; the answer, if it asks for one."""
        if isinstance(message, messages.LaunchStep):
            if not self._tells and len(self._under_way) > self._stages:  # a runner has buffers for one more
                self._under_way.popleft()[1].wait()
            self._runner.learn(message.drawn)
            self._note(self._runner.launch(message.plan, message.room))
        elif isinstance(message, messages.DrawLaunched):
            if self._undrawn is not None:
                masks = None if message.masks is None else _masks(message.masks)
                self._note(self._runner.draw(replace(self._undrawn, complete=message.complete, masks=masks)))
        elif isinstance(message, messages.Pool):
            vectors = self._executor.pooler.launch([PoolRequest(*prompt) for prompt in message.prompts])
            if self._tells and self._stages > 1:  # else rank 0 has them too
                self._under_way.append((self._leader.number, vectors))
        elif isinstance(message, messages.Settle):
            self._runner.settle()
            self.report()  # vectors are still wanted
            self._under_way.clear()
            self._undrawn = None
        elif isinstance(message, messages.MoveExperts):
            assert self._executor.experts is not None
            self._executor.experts.move(message.layer, np.array(message.slots))
        elif isinstance(message, messages.WeightBytes):
            self._weight += message.values
        elif isinstance(message, messages.UpdateWeight):
            self._update(message)
        elif isinstance(message, messages.CompareIds):
            return self._runner.ids_digest()
        else:
            raise _LeaderGone
        return None

    def _update(self, message: messages.UpdateWeight) -> None:
        tensor = torch.frombuffer(self._weight, dtype=getattr(torch, message.dtype)).view(message.shape)
        self._weight = bytearray()
        write = None
        with suppress(ValueError):  # rank 0 says so
            write = self._executor.weights.prepared(message.name, tensor)
        if self._leader.min_over_ranks(int(write is not None)):
            assert write is not None
            write()

    def _note(self, step: Launched | Undrawn) -> None:
        if isinstance(step, Undrawn):
            self._undrawn = step
        else:
            self._undrawn = None
            self._under_way.append((self._leader.number, step))


def _answer(number: int, ended: Launched | Pooled) -> messages.Answer:
    """What rank 0 is told of a step, or of prompts, that have ended. number: of the message that asked for it."""
    if isinstance(ended, Pooled):
        return messages.Vectors(number, ended.wait())
    return messages.Drawn(number, tuple(ended.wait()), ended.logprobs, ended.prompt_logprobs)


def _masks(rows: messages.MaskRows) -> MasksUnderWay:
    computed: Future[None] = Future()
    computed.set_result(None)
    return MasksUnderWay(computed, rows.buffer, rows.count, rows.words)


def _silent(line: str) -> None:
    """The first rank says what is to be said of a start."""


def _follow(job: _Job, leader: Leader) -> None:
    """Make what every rank makes, and do what rank 0 tells, until it ends. Raises _LeaderGone."""
    asked = job.engine
    device = asked.resolve_device(job.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config, _ = weights.resolve(asked.model, asked.load_format)
    ids = config.vocab_size  # masks come from rank 0
    with collector_off(), ExitStack() as beside:
        executor = build_executor(
            asked, config, device, ids, _silent, StartupClock(), beside, leader, details=_silent, show_progress=False
        )
    stages = asked.pipeline_parallel_size
    tells = asked.enable_dp_attention or (stages > 1 and job.rank == asked.ranks - asked.ranks // stages)
    steps = _Steps(executor, leader, stages, tells=tells)
    gc.collect(1)
    gc.freeze()  # no collection walks in the middle of a step what lives as long as the process
    while True:
        message = leader.next(steps.report)
        with memory_explained("running a step", executor.ledger):
            answer = steps.do(message)
        if answer is not None:
            leader.tell(messages.Value(answer))
        leader.done()


def main() -> None:
    end_with_parent(signal.SIGKILL)  # it may wait inside a library, where it hears nothing else
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Job)
    leader = Leader(job)
    code = 0
    try:
        _follow(job, leader)
    except _LeaderGone:
        pass
    except Exception as error:
        code, expected = 1, isinstance(error, (ValueError, EngineFault))
        message = str(error) if expected else f"{type(error).__name__}: {str(error).strip()}"
        where = "" if expected else traceback.format_exc()
        with suppress(OSError):
            leader.tell(messages.Failed(message, time.monotonic(), where))
    sys.stderr.flush()
    os._exit(code)  # an orderly end would wait for messages of ranks that have ended


if __name__ == "__main__":
    main()
