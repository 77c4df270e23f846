"""Loop and scheduler over a stand-in for the device with a clock of its own, and without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engine.simulated import LONGEST, load, simulate, uncrowded

HOST = (
    "cache.pages",
    "cache.prefix",
    "engine.collect",
    "engine.delivery",
    "engine.faults",
    "engine.loop",
    "engine.outputs",
    "engine.plan",
    "engine.prefixes",
    "engine.request",
    "engine.scheduler",
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
        assert found.first[request.id] >= request.arrival + runner.seconds_a_step
        assert found.last[request.id] - found.first[request.id] >= (longest - 1) * runner.seconds_a_step - 1e-6


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
