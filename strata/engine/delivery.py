"""Steps the engine for all who wait for outputs of theirs: whoever steps, everybody gets what the step brought."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from strata.engine.collect import Collector
from strata.engine.logprob_rows import LogprobRows
from strata.engine.loop import EngineLoop, StepOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Delivery:
    """The one owner of a loop and of the collectors of all its requests.

    Calls may be nested, as in a stream whose reader generates, but not simultaneous: one that comes while another is
    under way, from a second thread or a signal handler, raises RuntimeError. If a step fails, all requests end with it:
    the error goes to whoever stepped, the others get a RuntimeError when they step.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._collectors: dict[str, Collector] = {}
        self._abandoned: deque[str] = deque()
        self._lock = Lock()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Use the engine while nobody else does. Raises RuntimeError if somebody does."""
        if self._lock.locked():
            raise RuntimeError(
                "this LLM is in use: it takes one call at a time, from one thread; give each thread an LLM, or let "
                "`strata serve` answer callers side by side"
            )
        with self._lock:
            yield

    def add(self, collectors: Sequence[Collector], matchers: Iterable[LLMatcher | None]) -> None:
        """Queue all requests or none. Raises ValueError for one that can never run."""
        with self.exclusive():
            self._end_abandoned()
            try:
                for collector, matcher in zip(collectors, matchers, strict=True):
                    self._loop.add(collector.request, matcher)
                    self._collectors[collector.request.id] = collector
            except BaseException:
                self._abandoned += [collector.request.id for collector in collectors]
                self._end_abandoned()
                raise

    def step(self, wanted: Collector) -> None:
        """Run a step. Raises RuntimeError if `wanted`, which is unfinished, has ended with a step that failed."""
        with self.exclusive():
            self._end_abandoned()
            if self._loop.idle:
                self._collectors.clear()
            if wanted.request.id not in self._collectors:
                raise RuntimeError(
                    "this request ended unfinished, with a step that failed or was interrupted: repeat it"
                )
            try:
                output = self._loop.step()
                if output is not None:
                    self._deliver(output)
            except BaseException:
                self._abandoned += self._collectors
                self._end_abandoned()
                raise

    def leave(self, collectors: Sequence[Collector]) -> None:
        """End what is unfinished of these requests: now, or before the next step if one is under way (this may be the
        end of a stream that the garbage collector found)."""
        self._abandoned += [collector.request.id for collector in collectors if not collector.finished]
        if not self._lock.locked():
            with self._lock:
                self._end_abandoned()

    def _end_abandoned(self) -> None:
        while self._abandoned:
            id = self._abandoned[0]
            self._collectors.pop(id, None)
            self._loop.abort(id)
            self._abandoned.popleft()  # only now: an interrupt must not leave it to run on
        if not self._collectors:  # what is still under way belongs to nobody
            for _ in self._loop.outputs():
                pass

    def _deliver(self, output: StepOutput) -> None:
        collectors = self._collectors
        for sequence, part in output.prompt_logprobs:
            collector = collectors.get(sequence.request.id)
            if collector is not None:
                collector.append_prompt_logprobs(part.first, LogprobRows(part.tensors))
        rows = LogprobRows(output.logprobs) if output.logprobs is not None else None
        for update in output.updates:
            sequence = update.sequence
            collector = collectors.get(sequence.request.id)
            if collector is None:
                continue
            if not update.tokens:
                collector.fail(sequence)
            else:
                stopped = collector.append(sequence, update.tokens, update.finish_reason)
                if rows is not None:
                    collector.append_logprobs(sequence, rows, output.rows[sequence.id])
                if stopped is not None:
                    self._loop.finish(sequence, "stop", stopped)
            if collector.finished:
                del collectors[sequence.request.id]
