"""Loop and scheduler over a stand-in for the device with a clock of its own, and without torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.loop import EngineLoop
from strata.engine.plan import StepPlan
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from tests.engine.simulated import LONGEST, SECONDS_A_STEP, Device, SimulatedRunner, linear, load, simulate, uncrowded

HOST = (
    "cache.pages",
    "cache.prefix",
    "engine.collect",
    "engine.delivery",
    "engine.faults",
    "engine.given.segments",
    "engine.loop",
    "engine.outputs",
    "engine.plan",
    "engine.scheduling.prefixes",
    "engine.request",
    "engine.scheduling.scheduler",
)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_requests_end_as_they_would_alone_in_the_time_that_their_steps_take(run_ahead: bool) -> None:
    requests = load(300)
    found = simulate(requests, pages=40, run_ahead=run_ahead)
    assert len(found.samples) == sum(request.params.n for request in requests)
    for sample in found.samples:
        outputs, reason, stop = uncrowded(sample.request, sample.index, LONGEST)
        assert (sample.outputs, sample.finish_reason, sample.stop_reason) == (outputs, reason, stop)
    counted, runner = found.scheduler.statistics, found.runner
    assert counted.preemptions > 0
    assert counted.prefix_hits > 0
    assert runner.busy <= runner.now < requests[-1].arrival + runner.busy
    for request in requests:
        longest = max(len(uncrowded(request, index, LONGEST)[0]) for index in range(request.params.n))
        assert found.first[request.id] >= request.arrival + SECONDS_A_STEP
        assert found.last[request.id] - found.first[request.id] >= (longest - 1) * SECONDS_A_STEP - 1e-6


def test_after_an_interruption_new_sequences_take_the_slots_of_the_old(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, pages = SimulatedRunner(Device(4), linear), PageAllocator(20, 4)
    scheduler = Scheduler(SchedulerConfig(4, 32, 64), pages, PrefixTree(pages))
    ledger: Any = None
    loop = EngineLoop(scheduler, runner, True, ledger, clock=lambda: runner.now)

    def add(name: str) -> None:
        params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        for sequence in loop.add(Request(name, (3, 4, 5), params)):
            runner.device.asked[sequence.id] = (sequence.index, "")

    add("a")
    loop.step()
    with monkeypatch.context() as broken:
        broken.setattr(scheduler, "complete", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            loop.step()
    assert loop.idle
    add("b")
    updates = [update for output in loop.outputs() for update in output.updates]
    assert len(updates) == 4
    assert updates[-1].finish_reason == "length"


def test_a_plan_encodes_whatever_kind_of_integers_its_parameters_are() -> None:
    scheduler = Scheduler(SchedulerConfig(4, 32, 64), PageAllocator(20, 4), None)
    two: Any = np.int64(2)
    params = SamplingParams(
        logprobs=two, prompt_logprobs=two, min_tokens=two, stop_token_ids=[two], top_k=two, seed=two
    )
    scheduler.add(Request("a", (1, 2, 3), params))
    plan = scheduler.schedule()
    assert plan is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan) == plan


def test_the_hosts_half_runs_without_torch_and_llguidance() -> None:
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['llguidance'] = None\n"
        f"for name in {HOST}: __import__('strata.' + name)\n"
        "from tests.engine.simulated import load, simulate\n"
        "print(sum(sample.finished for sample in simulate(load(20), pages=40, run_ahead=True).samples))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert int(done.stdout) == sum(request.params.n for request in load(20))
