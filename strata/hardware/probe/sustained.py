"""What a product reaches in its first moments and when it has run for seconds, as a power limit or heat allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from strata.hardware.dcgm import activity_reader
from strata.hardware.nvml import NvmlDevice
from strata.hardware.probe.ceiling import Ceiling
from strata.hardware.telemetry import Summary, TelemetrySampler

_IDLE_SECONDS = 0.5
_BURST_SECONDS = 0.05
_LAST = 0.3  # the share of the time at whose end the rate counts as sustained


def hold(
    call: Callable[[], object],
    size: int,
    seconds: float,
    summaries: dict[str, Summary],
    *,
    dtype: str,
    wait: Callable[[], object] = lambda: None,
    batch: int = 1,
    count: int = 1,
    telemetry: NvmlDevice | None = None,
) -> Iterator[Ceiling]:
    """The rate of a square product of `size` at first, after a pause, and over the last part of so many seconds.

    call: starts it. wait: until all that was started is done. batch: how many are started between waits. count: threads
    of a CPU. summaries: gets what the device told meanwhile, under the quantity.
    """
    call()
    wait()
    time.sleep(_IDLE_SECONDS)
    ends: list[float] = []
    with activity_reader(telemetry) as activity, TelemetrySampler(telemetry, activity=activity) as sampler:
        start = time.perf_counter()
        while not ends or ends[-1] - start < seconds:
            for _ in range(batch):
                call()
            wait()
            ends.append(time.perf_counter())
    marks = [start, *ends]
    early = max(1, sum(end <= start + _BURST_SECONDS for end in ends))
    late = min(len(ends) - 1, int(len(ends) * (1 - _LAST)))
    for quantity, first, last in (("product, burst", 0, early), ("product, sustained", late, len(ends))):
        each = (marks[last] - marks[first]) / ((last - first) * batch)
        summaries[quantity] = Summary.of(sampler.between(marks[first], marks[last]))
        shape = (size,) * 3
        yield Ceiling(quantity, 2 * size**3 / each, each, dtype, shape, count)
