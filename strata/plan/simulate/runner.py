"""A device that is not there: its steps take a predicted time on a clock of their own, and its ids are made up."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Listed
from typing import Any

from strata.engine.plan import StepPlan, UndrawnStep
from strata.plan.simulate.host import HostTimes
from strata.plan.simulate.prices import StepPrices

# Every id that nobody has told.
BLANK = 0


class SimulatedStep:
    """A step that is under way, as `strata.engine.loop.LaunchedStep`. done: when it ends."""

    logprobs: None = None
    prompt_logprobs: tuple[()] = ()
    masked = False
    arrived: tuple[()] = ()

    def __init__(self, runner: SimulatedRunner, plan: StepPlan, ids: list[int], done: float, size: Hashable) -> None:
        self._runner, self.plan, self.ids, self.done, self.size = runner, plan, ids, done, size
        self.is_read = False

    @property
    def ended(self) -> bool:
        return self.done <= self._runner.now

    def wait(self) -> list[int]:
        """Passes the time until the step has ended."""
        self._runner.now = max(self._runner.now, self.done)
        self.is_read = True
        return self.ids


class SimulatedRunner:
    """Runs plans in the order of their launch, as `strata.engine.loop.Runner`, each after the one before.

    now: the host's clock, in seconds. newest: the step that was launched last. drawn: of a sequence, by its id, what it
    draws; BLANK where nothing is told.
    """

    def __init__(self, prices: StepPrices, host: HostTimes) -> None:
        self._prices, self._host = prices, host
        self.now = self.busy_until = 0.0
        self.newest: SimulatedStep | None = None
        self.drawn: dict[int, Listed[int]] = {}
        self.observer: Any = None

    def launch(self, plan: StepPlan) -> SimulatedStep:
        seconds, size = self._prices.price(plan)
        self.now += self._host.launch(len(plan.chunks))
        self.busy_until = max(self.busy_until, self.now) + seconds
        ids = [BLANK] * len(plan.draws) if not self.drawn else self._told(plan)
        self.newest = SimulatedStep(self, plan, ids, self.busy_until, size)
        return self.newest

    def mask(self, step: Any, matchers: Any) -> UndrawnStep:
        raise NotImplementedError("no grammar is simulated")

    def draw(self, step: Any) -> SimulatedStep:
        raise NotImplementedError("no grammar is simulated")

    def settle(self) -> None:
        self.now = max(self.now, self.busy_until)

    def _told(self, plan: StepPlan) -> list[int]:
        """A draw follows the last of its chunk's tokens."""
        ids = []
        for chunk in plan.chunks:
            for draw in chunk.draws:
                told = self.drawn.get(draw.sequence)
                ids.append(BLANK if told is None else told[chunk.start + chunk.count])
        return ids
