"""What `strata bench gaps T5` found, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from strata.bench.result import HostGap, number, provenance
from strata.bench.served.timeline import LatencySplit, StepKind
from strata.bench.trace import GapSplit, TraceTime
from strata.text.counted import counted

_GROUPS = {"mean": "mean", "p50": "around p50", "p99": "around p99"}


@dataclass(frozen=True)
class ServedGaps:
    """One load. Seconds, but latencies in ms.

    data: what was asked, in words. request_rate: requests a second. wall: from the first arrival to the last token.
    idle: of that, while no request was there. split: the rest of it, without a profiler; how long kernels ran in a step
    is the trace's. steps: by their kind. trace: of some steps of a second run, None where no device runs apart from the
    host.
    """

    test: str
    model: str
    dtype: str
    data: str
    request_rate: float
    requests: int
    seed: int
    wall: float
    idle: float
    split: GapSplit
    host_gap: HostGap
    steps: dict[str, StepKind]
    ttft: LatencySplit
    tpot: LatencySplit | None
    trace: TraceTime | None
    device: str

    def values(self) -> dict[str, Any]:
        """As JSON, with the largest part and where it came from; an infinite rate is "inf"."""
        values = {**asdict(self), "largest": self.split.largest, **provenance()}
        values |= {f"{name}_ms": values.pop(name) for name in ("ttft", "tpot")}
        if math.isinf(self.request_rate):
            values["request_rate"] = "inf"
        return values

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        rate = "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s"
        load = f"{counted(self.requests, 'request')}, {rate}, {self.data}"
        yield f"{self.test} {self.model} {self.dtype}: {load}; {self.device}"
        yield self._row("wall", self.wall)
        yield self._row("idle, no request", self.idle)
        if self.split.floor is not None:
            yield self._row("floor of the steps", self.split.floor)
        for name, seconds in self.split.breakdown().items():
            yield self._row(name, seconds)
        yield f"largest: {self.split.largest}; {self.host_gap.text()}"
        yield from self._step_lines()
        yield from _latency_lines("TTFT", self.ttft)
        if self.tpot is not None:
            yield from _latency_lines("TPOT", self.tpot)
        if self.trace is not None:
            first, *others = self.trace.lines()
            yield f"trace of {first}"
            yield from others

    def _row(self, name: str, seconds: float) -> str:
        return f"{name:28}{seconds:10.3f} s {seconds / self.wall:7.1%}"

    def _step_lines(self) -> Iterator[str]:
        columns = ("steps", "s", "floor, s", "kernels, s", "median ms", "sequences", "tokens")
        yield f"{'steps':28}" + "".join(f"{column:>11}" for column in columns)
        for name, kind in self.steps.items():
            floor = "-" if kind.floor is None else f"{kind.floor:.3f}"
            cells = (
                f"{kind.steps:,}", f"{kind.seconds:.3f}", floor, f"{kind.busy:.3f}", f"{1e3 * kind.median:.3f}",
                number(kind.sequences), number(kind.tokens),
            )  # fmt: skip
            yield f"{name:28}" + "".join(f"{cell:>11}" for cell in cells)


def _latency_lines(name: str, latency: LatencySplit) -> Iterator[str]:
    yield f"{name + ', ms':28}" + "".join(f"{group:>14}" for group in _GROUPS.values())
    for part, found in latency.parts.items():
        yield f"{'  ' + part:28}" + "".join(f"{found[group]:14.3f}" for group in _GROUPS)
    sums = (math.fsum(part[group] for part in latency.parts.values()) for group in _GROUPS)
    yield f"{'  together':28}" + "".join(f"{total:14.3f}" for total in sums)
    yield f"  p50 {latency.p50:.3f}, p99 {latency.p99:.3f}"
