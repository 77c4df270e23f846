"""What runs in each step of an engine and when, cheap enough that the run is as fast as without: see `StepRecorder`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.bench.served.step_logs import step_log
from strata.plan.explain.measurement import MeasuredStep
from strata.plan.explain.waterfalls import TOKENIZATION

if TYPE_CHECKING:
    from strata.engine.build import Engine
    from strata.engine.plan import StepPlan
    from strata.text.tokenizer import Tokenizer


class StepRecorder:
    """An observer of an engine's steps: CUDA events on a GPU, the engine's clock on a CPU.

    On a CPU also how long the engine's thread had a processor: the rest of a step others had it. On a GPU how long it
    had none while it launched a step, which takes nothing but a processor (but for compilers and grammars' masks, for
    which it waits), and whether a step replayed no CUDA graph for lack of one of its size.
    """

    def __init__(self, engine: Engine) -> None:
        self._log = step_log(engine.device, engine.loop.clock)
        self._compilations = engine.compilations
        self._host = engine.device.type == "cpu"
        self._captured = engine.captured
        self._uncaptured = self._eager_steps()
        self._ran: list[float] = []
        self._delayed: list[float] = []
        self._compiled: list[int] = []
        self._eager: list[bool] = []
        self._is_eager = False
        self._began, self._from, self._before = 0.0, 0.0, 0

    def begin(self, plan: StepPlan) -> None:
        self._before = self._compilations.total
        uncaptured = self._eager_steps()  # counted before a step begins
        self._is_eager = uncaptured > self._uncaptured
        self._uncaptured = uncaptured
        self._log.begin(plan)
        self._from, self._began = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        ran, passed = time.thread_time() - self._began, time.perf_counter() - self._from
        self._log.end()
        self._ran.append(ran)
        self._delayed.append(max(0.0, passed - ran))
        self._compiled.append(self._compilations.total - self._before)
        self._eager.append(self._is_eager)

    def _eager_steps(self) -> int:
        return 0 if self._captured is None else sum(self._captured.uncaptured.values())

    def steps(self, start: float) -> tuple[MeasuredStep, ...]:
        """All steps so far; start: of the run, by the engine's clock."""
        return tuple(
            MeasuredStep(
                step.begin - start,
                step.end - start,
                step.chunks,
                processor=ran if self._host else None,
                compiled=compiled,
                delayed=0.0 if self._host else delayed,
                eager=eager,
            )
            for step, ran, delayed, compiled, eager in zip(
                self._log.steps(), self._ran, self._delayed, self._compiled, self._eager, strict=True
            )
        )


@dataclass
class HostSpans:
    """Seconds of what the host does beside steps, by name. clock: the engine's."""

    clock: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def tokenization(self, tokenizer: Tokenizer | None) -> Iterator[None]:
        """Inside, how long prompts take to become ids adds up."""
        if tokenizer is None:
            yield
            return
        encode = tokenizer.encode

        def timed(*arguments: object, **options: object) -> list[int]:
            began = self.clock()
            ids: list[int] = encode(*arguments, **options)  # type: ignore[arg-type]  # as the caller gave them
            self.seconds[TOKENIZATION] = self.seconds.get(TOKENIZATION, 0.0) + self.clock() - began
            return ids

        tokenizer.encode = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            tokenizer.encode = encode  # type: ignore[method-assign]
