"""The loop over the stages of a pipeline, on a simulated one that checks what steps read."""

from __future__ import annotations

import pytest

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import StepPlan
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler

from .simulated import (
    LONGEST,
    Device,
    SimulatedRunner,
    SimulatedStep,
    Simulation,
    Unchecked,
    drive,
    linear,
    load,
    uncrowded,
)


class Stages(SimulatedRunner):
    """Each stage does its part of a step after the one before, and one step at a time."""

    def __init__(self, device: Device | Unchecked, stages: int) -> None:
        super().__init__(device, linear)
        self.free = [0.0] * stages

    def launch(self, plan: StepPlan) -> SimulatedStep:
        done = self.now
        for at, free in enumerate(self.free):
            done = max(done, free) + linear(plan) / len(self.free)
            self.free[at] = done
        self.busy_until = done
        return SimulatedStep(self, plan, self.device.launch(plan), done)


def simulated(
    requests: list[Request], stages: int, pages: int, run_ahead: bool, checked: bool = True, draws: int = 1
) -> Simulation:
    allocator = PageAllocator(pages, page_size=4)
    config = SchedulerConfig(8, 32, LONGEST, draws=draws, stages=stages)
    scheduler = Scheduler(config, allocator, PrefixTree(allocator))
    return drive(scheduler, Stages(Device(4) if checked else Unchecked(), stages), requests, run_ahead)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(("pages", "draws"), [(24, 1), (24, 3), (200, 1), (200, 3)])
def test_requests_end_as_they_would_alone(stages: int, run_ahead: bool, pages: int, draws: int) -> None:
    found = simulated(load(60), stages, pages, run_ahead, draws=draws)
    for sample in found.samples:
        outputs, reason, stop = uncrowded(sample.request, sample.index, LONGEST)
        assert (sample.outputs, sample.finish_reason, sample.stop_reason) == (outputs, reason, stop)


def test_stages_work_at_once() -> None:
    """Eight sequences of 40 ids each. One stage does a step of 8 tokens in 18 ms. Each of two does its half of a step
    of 4 tokens in 7 ms, so 40 rounds of two such steps take 40 * 14 ms, and not 40 * 28 ms as one after the other."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [Request(str(one), (one, 3), sampling) for one in range(8)]
    times = {stages: simulated(list(requests), stages, 200, True, checked=False).runner.now for stages in (1, 2)}
    assert times[1] == pytest.approx(40 * 0.018, rel=0.05)
    assert times[2] == pytest.approx(40 * 0.014, rel=0.1)
