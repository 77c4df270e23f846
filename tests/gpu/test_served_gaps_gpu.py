"""What the benchmark sees of a served load on a GPU. It makes an engine of its own, and no other may be alive."""

from __future__ import annotations

import math

import pytest

from strata.bench.load.request_sets import EvenLengths
from strata.bench.run import Setup
from strata.bench.served.measure import ServedTest, served_gaps
from strata.models.folder import BUILTIN_FOLDER

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_a_served_load_is_timed_and_traced() -> None:
    setup = Setup(str(BUILTIN_FOLDER), None, "bfloat16", "cuda", False)
    for found in served_gaps(setup, ServedTest([100.0, math.inf], 60, 0, EvenLengths(64, 20))):
        assert found.trace is not None
        assert 0 < found.trace.steps <= 200
        assert found.trace.kernels_per_step > 10
        assert found.idle + found.split.wall == pytest.approx(found.wall)
        steps = sum(kind.seconds for kind in found.steps.values())
        assert steps + found.split.host == pytest.approx(found.split.wall, rel=1e-3)
        assert found.split.busy == pytest.approx(sum(kind.busy for kind in found.steps.values()))
        assert 0 < found.split.busy < 1.5 * steps
        assert found.tpot is not None
        for latency in (found.ttft, found.tpot):
            assert 0 < latency.p50 <= latency.p99 < 1e3
        # The clocks of host and device agree: nothing runs before it is launched, nor is delivered before it has run.
        parts = [found.ttft.parts[name]["mean"] for name in ("behind earlier steps", "delivery")]
        assert min(parts) > -0.05
