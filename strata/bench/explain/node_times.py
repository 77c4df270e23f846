"""Seconds of each operation in the steps of an engine on a CPU: graphs run node by node, a clock around each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import fx

from strata.bench.graph_calls import TimedNodes, replaced
from strata.graph.capture import operation_of
from strata.kernels.torch_functions import TORCH_FUNCTIONS
from strata.plan.explain.explanation import StepWork
from strata.plan.explain.measurement import MeasuredStep, StepChunk, TracedOperations

if TYPE_CHECKING:
    from strata.engine.plan import StepPlan
    from strata.engine.program.program import StepProgram


class NodeTimes:
    """An observer that knows how long the operations of each kind of step took, without what lies between them, which
    takes longer node by node."""

    def __init__(self) -> None:
        self._seconds: dict[StepWork, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._kind: StepWork = "decode"

    def begin(self, plan: StepPlan) -> None:
        chunks = tuple(StepChunk(one.sequence, one.start, one.count, len(one.draws)) for one in plan.chunks)
        self._kind = MeasuredStep(0.0, 0.0, chunks).kind

    def end(self) -> None:
        pass

    def note(self, node: fx.Node, seconds: float) -> None:
        """What looks at memory alone is none of a step's operations."""
        operation = operation_of(node) or TORCH_FUNCTIONS.get(node.target)
        if operation is not None:
            self._seconds[self._kind][operation.name] += seconds

    def traced(self, steps: Iterable[MeasuredStep]) -> dict[StepWork, TracedOperations]:
        """steps: the same work without clocks around nodes. A served load may have kinds of steps in one of its runs
        that it lacks in another: of these nothing is known."""
        whole: dict[StepWork, float] = defaultdict(float)
        for step in steps:
            whole[step.kind] += step.seconds if step.processor is None else step.processor
        return {kind: TracedOperations(dict(self._seconds[kind]), whole[kind]) for kind in whole if self._seconds[kind]}

    def of(self, program: StepProgram) -> AbstractContextManager[None]:
        """Inside, the graphs of steps tell this how long their nodes take."""
        return replaced(program.graphs(), lambda _, graph: TimedNodes(graph, time.thread_time, self.note).run)
