"""Who is told of steps while they are measured."""

from __future__ import annotations

from typing import Protocol

from strata.engine.plan import StepPlan


class StepObserver(Protocol):
    """Told, while the host enqueues a step, where its work on the device begins and where it ends."""

    def begin(self, plan: StepPlan) -> None: ...

    def end(self) -> None: ...
