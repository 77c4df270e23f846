"""The other ranks of an engine, as rank 0 sees them: started, told what to do, watched, and ended with it."""

from __future__ import annotations

import os
import queue
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import torch

from strata.comm.mesh import Axis
from strata.engine.engine_config import EngineConfig
from strata.engine.faults import EngineFault
from strata.engine.ranks import messages, world
from strata.engine.ranks.heartbeat import HEARTBEAT_SECONDS, Heartbeats, shared_file
from strata.engine.ranks.messages import Answer, Vectors
from strata.engine.startup.clock import Log
from strata.files.child_modules import command_of, with_package

MODULE = "strata.engine.ranks.follower"
# A rank that has something to do and says nothing for so long has stopped. It speaks from a thread of its own, whatever
# its messages and its device make it wait for.
SILENT_SECONDS = 10.0
# The same until all have connected: imports and drivers hold the interpreter's lock, so that no thread of it speaks.
_START_SECONDS = 120.0
# In which all that are there, rank 0 too, must have got on with one message.
STEP_SECONDS = 300.0
# After a rank has ended: who failed because of it says so no later than this.
_APART_SECONDS = 0.3
# In which a follower ends by itself when it is told to; also, in which it becomes known why a collective has failed.
_END_SECONDS = 5.0


class Answers:
    """What has come from a rank that tells; one thread puts it here, another takes it."""

    def __init__(self) -> None:
        self._coming: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._kept: dict[int, Answer] = {}
        self._first = 0

    def put(self, answer: Answer) -> None:
        self._coming.put(answer)

    def take(self, number: int, seconds: float) -> Answer | None:
        """The answer to message `number`; None if it does not come in so many seconds."""
        with suppress(queue.Empty):
            while number not in self._kept:
                came = self._coming.get(timeout=seconds)
                if isinstance(came, Vectors) or came.number >= self._first:
                    self._kept[came.number] = came
        return self._kept.pop(number, None)

    def forget_steps(self, before: int) -> None:
        """Nobody will take the answers of steps before message `before`."""
        self._first = before
        self._kept = {number: one for number, one in self._kept.items() if isinstance(one, Vectors)}


@dataclass
class _Follower:
    """process: once it is started. channel: on which it hears and answers. silent_since: when it last said that it
    lives, or got on, by this process's clock; beats, done: what its counters were then."""

    rank: int
    channel: socket.socket
    theirs: socket.socket
    started: float
    process: subprocess.Popen[bytes] | None = None
    values: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)
    answers: Answers = field(default_factory=Answers)
    failed: messages.Failed | None = None
    gone: bool = False
    beats: int = 0
    done: int = 0
    heard: float = 0.0
    moved: float = 0.0


class Followers:
    """Ranks 1 to size - 1, as processes. All but `check` is called from one thread.

    A thread starts them, because the kernel ends them with the thread that did (`end_with_parent`), and watches them:
    one that ends or hangs ends them all, so that a collective that waits for it fails, and from then on every call
    raises EngineFault with the cause.
    """

    index = 0

    def __init__(self, asked: EngineConfig, log: Log) -> None:
        """log: is told where an error of another rank came from. Raises ValueError if the ranks could not meet."""
        self.size, self.stages = asked.ranks, asked.pipeline_parallel_size
        self._store = world.meeting_place(self.size)
        self._asked, self._log = asked, log
        self._encode, self._decode = messages.encoder(), messages.decoder(messages.ToLeader)
        self._sent = 0
        self._fault: str | None = None
        self._known = threading.Event()  # that there is a fault, or that they have ended
        self._ending = self._joined = False
        self._descriptor = shared_file(self.size)
        self._beats = Heartbeats(self._descriptor)
        pairs = [socket.socketpair() for _ in range(1, self.size)]
        self._looked = now = time.monotonic()
        self._all = [
            _Follower(rank, ours, theirs, now, heard=now, moved=now) for rank, (ours, theirs) in enumerate(pairs, 1)
        ]
        self._channels = [one.channel for one in self._all]
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    @property
    def processes(self) -> dict[int, int]:
        """The process id of each rank that has been started."""
        return {one.rank: one.process.pid for one in self._all if one.process is not None}

    def check(self) -> None:
        """Raises EngineFault if a rank has ended or hangs."""
        if self._fault is not None:
            raise self._broken()

    def send(self, message: messages.ToFollower) -> int:
        """Tell all of them; returns the number of the message. Raises EngineFault if one has ended or hangs."""
        return self._send((messages.framed(self._encode(message)),) * len(self._channels))

    def send_each(self, told: Sequence[messages.ToFollower]) -> int:
        """Tell each what is its own, in the order of the ranks; otherwise as `send`."""
        return self._send([messages.framed(self._encode(message)) for message in told])

    def _send(self, frames: Sequence[bytes]) -> int:
        self.check()
        self._sent += 1
        try:
            for channel, frame in zip(self._channels, frames, strict=True):
                channel.sendall(frame)
        except OSError as error:
            raise self.fault_of(error) from None
        return self._sent - 1

    def answer(self, rank: int, number: int) -> messages.Answer:
        """What a rank tells of message `number`, once it has come. Raises EngineFault if a rank has ended or hangs."""
        until = time.monotonic() + STEP_SECONDS
        while time.monotonic() < until:
            self.check()
            if (answer := self._all[rank - 1].answers.take(number, HEARTBEAT_SECONDS)) is not None:
                return answer
        raise EngineFault(f"rank 0 has waited for the end of a step for {STEP_SECONDS:g} s")

    def forget_steps(self, before: int) -> None:
        """Nobody will ask for the answers of steps that were launched before message `before`."""
        for one in self._all:
            one.answers.forget_steps(before)

    @property
    def drawing_rank(self) -> int:
        """The first that draws: of the last stage."""
        return self.size - self._ranks_of_a_stage

    @property
    def _ranks_of_a_stage(self) -> int:
        return self.size // self.stages

    def fault_of(self, error: BaseException) -> EngineFault:
        """Why this rank's own part of something has failed: because another has ended, or else by itself, which ends
        the others: they are not where this one is any more."""
        self._known.wait(_END_SECONDS)
        if self._fault is None:
            self._end(f"rank 0 of {self.size} has failed: {type(error).__name__}: {str(error).strip()}")
        return self._broken()

    def min_over_ranks(self, value: int) -> int:
        """See `Rank`."""
        agreed = min(value, *self._values())
        self.send(messages.Agree(agreed))
        return agreed

    def same_ids(self, own: int) -> bool:
        """Whether all ranks that draw have drawn the same ids. own: of `ids_digest` of this rank's runner."""
        self.send(messages.CompareIds())
        values = [own, *self._values()]
        return len(set(values[-self._ranks_of_a_stage :])) == 1

    def join(self, device: torch.device) -> dict[str, Axis]:
        """See `Rank`."""
        self.min_over_ranks(0)  # so that nobody waits for one that is still loading, or has ended
        try:
            self._world, axes = world.join(self._store, 0, self._asked, device)
        except Exception as error:
            raise self.fault_of(error) from error
        self._joined = True
        return axes

    def before_leaving(self, drop: Callable[[], None]) -> None:
        """Have `stop` call this before it leaves the process group: NCCL waits for CUDA graphs that hold messages."""
        if self._world.device.type == "cuda":
            self._world.on_shutdown.append(drop)

    def stop(self) -> None:
        """End them, and leave the process group; nothing of them is left then."""
        if not self._known.is_set():
            self._ending = True
            with suppress(EngineFault):
                self.send(messages.End())
        if threading.current_thread() is self._watching:  # in which garbage may be collected, too; it ends behind this
            self._kill()
            for one in self._all:
                one.gone = True
        else:
            self._watching.join(_END_SECONDS)
            self._kill()
            self._watching.join()
            for one in self._all:
                one.channel.close()
        for one in self._all:
            one.theirs.close()
        os.close(self._descriptor)
        self._leave()

    def _broken(self) -> EngineFault:
        """The fault. On a CPU another engine may be started from now on, whoever keeps this one; on CUDA captured steps
        hold the group."""
        self._known.wait(_END_SECONDS)
        if self._joined and self._world.device.type == "cpu":
            self._leave()
        assert self._fault is not None
        return EngineFault(self._fault)

    def _leave(self) -> None:
        if self._joined:
            self._joined = False
            if self._fault is None or self._world.device.type == "cpu":  # else the device may wait for ever
                world.leave(self._world)

    def _values(self) -> list[int]:
        return [self._value(one) for one in self._all]

    def _value(self, one: _Follower) -> int:
        while True:
            self.check()
            with suppress(queue.Empty):
                return one.values.get(timeout=HEARTBEAT_SECONDS)

    def _watch(self) -> None:
        """Start them and watch them until all have ended."""
        try:
            self._start_and_watch()
        except Exception as error:  # whatever it is, nobody watches any more
            self._end(f"rank 0 of {self.size} can no longer watch the others: {error!r}")

    def _start_and_watch(self) -> None:
        """Start them, take what they say, and find out whether they live."""
        try:
            for one in self._all:
                self._start(one)
        except OSError as error:
            self._end(f"rank {one.rank} of {self.size} could not be started: {error}")
            return
        with selectors.DefaultSelector() as selector:
            for one in self._all:
                selector.register(one.channel, selectors.EVENT_READ, (one, messages.Frames(one.channel)))
            while not all(one.gone for one in self._all):
                for key, _ in selector.select(HEARTBEAT_SECONDS):
                    one, frames = key.data
                    if not self._take(one, frames):
                        selector.unregister(one.channel)
                if self._ending:
                    continue
                if any(one.gone or one.failed for one in self._all):
                    self._explain(selector)
                    return
                if (hanging := self._hanging()) is not None:
                    self._end(hanging)
                    return
        self._known.set()

    def _start(self, one: _Follower) -> None:
        job = {"engine": asdict(self._asked), "rank": one.rank, "port": self._store.port}
        job |= {"channel": one.theirs.fileno(), "beats": self._descriptor}
        one.process = subprocess.Popen(
            command_of(MODULE),
            env=with_package(os.environ),
            stdin=subprocess.PIPE,
            stdout=2,  # what libraries print is no part of what this process prints
            pass_fds=(one.theirs.fileno(), self._descriptor),
        )
        one.theirs.close()  # so that the end of the process is the end of the connection
        assert one.process.stdin is not None
        with suppress(OSError):  # it has ended already, which its channel says
            one.process.stdin.write(msgspec.json.encode(job) + b"\n")
            one.process.stdin.close()

    def _take(self, one: _Follower, frames: messages.Frames) -> bool:
        """Take what a rank says; False once it says no more."""
        if not frames.receive():
            one.gone = True
            return False
        while (frame := frames.next()) is not None:
            message = self._decode(frame)
            if isinstance(message, messages.Value):
                one.values.put(message.value)
            elif isinstance(message, messages.Answer):
                one.answers.put(message)
            else:
                one.failed = message
        return True

    def _explain(self, selector: selectors.BaseSelector) -> None:
        """Say who failed first: others fail because of it, and soon."""
        until = time.monotonic() + _APART_SECONDS
        while (left := until - time.monotonic()) > 0 and selector.get_map():
            for key, _ in selector.select(left):
                if not self._take(*key.data):
                    selector.unregister(key.fileobj)
        killed = [one for one in self._all if one.gone and one.failed is None]
        failed = sorted((one.failed.when, one.rank) for one in self._all if one.failed is not None)
        if killed:
            self._end(f"{self._name(killed[0])} {_how_it_ended(killed[0].process)}")
        else:
            one = self._all[failed[0][1] - 1]
            assert one.failed is not None
            if one.failed.traceback:
                self._log(one.failed.traceback)
            self._end(f"{self._name(one)} has failed: {one.failed.message}")

    def _hanging(self) -> str | None:
        """Who has something to do and has not got on with it for too long, in words; None if nobody."""
        now, slow = time.monotonic(), []
        stopped, self._looked = max(0.0, now - self._looked - 2 * HEARTBEAT_SECONDS), now
        for one in self._all:
            # While this process was stopped (Ctrl-Z, a frozen container), they may have been, too.
            one.heard, one.moved = one.heard + stopped, one.moved + stopped
            beats, done = self._beats.of(one.rank)
            if beats != one.beats:
                one.beats, one.heard = beats, now
            if done != one.done or done >= self._sent:
                one.done, one.moved = done, now
            elif now - one.moved > STEP_SECONDS:
                slow.append(one)
            silence = SILENT_SECONDS if self._joined or _state(one.process) else _START_SECONDS
            if done >= self._sent and self._joined:
                one.heard = now  # it has nothing to do
            elif now - one.heard > silence:
                return f"{self._name(one)} has not answered for {silence:g} s{_state(one.process)}"
        if slow and self._joined:
            last = min(slow, key=lambda one: one.done)
            return f"{self._name(last)} has not got on with a step for {STEP_SECONDS:g} s{_state(last.process)}"
        return None

    def _name(self, one: _Follower) -> str:
        stage = f"stage {one.rank // self._ranks_of_a_stage}, " if self.stages > 1 else ""
        return f"rank {one.rank} of {self.size} ({stage}process {one.process.pid if one.process is not None else None})"

    def _end(self, fault: str) -> None:
        """End all of them, because of this."""
        if self._fault is None:
            self._fault = fault
        self._kill()
        self._known.set()
        if self._joined:
            world.abort(self._world)

    def _kill(self) -> None:
        for one in self._all:
            if one.process is not None:
                one.process.kill()
        for one in self._all:
            if one.process is not None:
                one.process.wait()


def _how_it_ended(process: subprocess.Popen[bytes] | None) -> str:
    """An exit in words."""
    if process is None:
        return "has ended"
    try:
        status = process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return "has closed its connection"
    if status >= 0:
        return f"has ended with exit code {status}"
    why = " (out of memory?)" if status == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{why}"


def _state(process: subprocess.Popen[bytes] | None) -> str:
    """Why a process does nothing, where the kernel knows (Linux)."""
    with suppress(OSError, IndexError, AttributeError):
        assert process is not None
        if Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT":
            return ": it is stopped (SIGSTOP)"
    return ""
