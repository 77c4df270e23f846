"""`strata bench gaps`: what stands between a test and its floor: slow kernels, launch gaps, or the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from strata.bench import workloads
from strata.bench.result import HostGap, provenance, short_dtype
from strata.bench.run import Setup, call, device_name, floor_on, started
from strata.bench.trace import GapSplit, TraceTime
from strata.cli.bench.options import Report, ReportOptions, setup_options
from strata.cli.groups import grouped


@grouped
def gaps(
    test: Annotated[str, typer.Argument(help="T1, T2, T3-bN (N requests), T4, or T5, a served load.")],
    *,
    setup: Annotated[
        Setup,
        setup_options("model load_format dtype device deterministic tensor_parallel_size enable_expert_parallel"),
    ],
    request_rate: Annotated[
        str | None, typer.Option(help="T5: requests a second, several between commas; 55 if left out.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="T5: requests of each load; 500 if left out.")] = None,
    seed: Annotated[int | None, typer.Option(help="T5: of prompts and arrivals, as in bench serve; 0.")] = None,
    to: Report,
) -> None:
    """Split the time of a test into floor, kernels over it, launch gaps and host gaps; of T5, latencies as well.

    T1 to T4 need CUDA. Over several ranks the device is the first's, and messages that nothing hides are a part.

    Example: strata bench gaps T5 --model 8B --request-rate 10,20 --save gaps.jsonl
    """
    if test == "T5":
        _served(setup, request_rate, num_prompts, seed, to)
        return
    if any(given is not None for given in (request_rate, num_prompts, seed)):
        raise ValueError(f"--request-rate, --num-prompts and --seed are of T5, a served load; {test} comes at once")
    _offline(test, setup, to)


def _served(
    setup: Setup, request_rate: str | None, num_prompts: int | None, seed: int | None, to: ReportOptions
) -> None:
    from strata.bench.load.arrivals import parse_rates
    from strata.bench.served.measure import RATE, REQUESTS, ServedTest, served_gaps

    rates = parse_rates(RATE if request_rate is None else request_rate)
    if any(rate.of_saturation for rate in rates):
        raise ValueError(
            f"--request-rate of `strata bench gaps` takes requests a second (55) or inf, got {request_rate!r}: "
            "`strata bench serve` measures the saturation that percent are of"
        )
    test = ServedTest([rate.value for rate in rates], num_prompts or REQUESTS, seed or 0)
    for found in served_gaps(setup, test):
        to.report(found.values(), found.text())


def _offline(test: str, setup: Setup, to: ReportOptions) -> None:
    import torch

    tested = workloads.named(test, or_served=True)
    if setup.device == "cpu" or not torch.cuda.is_available():
        raise ValueError(f"strata bench gaps {test} traces a CUDA device; there is none here (T5 runs on a CPU, too)")

    from strata.bench.step_observers import time_steps, trace

    llm = started(setup, tested)
    call(llm, tested)
    times, traced = time_steps(llm, tested), trace(llm, tested)
    name = device_name(llm)
    floor = floor_on(tested, setup, name)
    launch = sum(times.steps) - traced.busy
    split = GapSplit(times.wall, floor, traced.busy, launch, times.host, traced.exposed)
    found = GapReport(setup.test_name(test), setup.model, short_dtype(setup.dtype), split, times.host_gap, traced, name)
    to.report(found.values(), found.text())


@dataclass(frozen=True)
class GapReport:
    """What `strata bench gaps` found.

    split: of a call without the profiler, by CUDA events around each step; how long kernels ran in it is the trace's.
    """

    test: str
    model: str
    dtype: str
    split: GapSplit
    host_gap: HostGap
    trace: TraceTime
    device: str

    def values(self) -> dict[str, Any]:
        """As JSON, with the derived figures and where they came from."""
        derived = {"largest": self.split.largest, "idle_share": self.trace.idle_share}
        return {**asdict(self), **derived, **provenance()}

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.test} {self.model} {self.dtype}; {self.device}"
        columns = (self.split, self.trace.split(self.split.floor))
        yield f"{'':20}{'call':>20}{'trace':>20}"
        yield self._row("wall", *((column.wall, column.wall) for column in columns))
        if self.split.floor is not None:
            yield self._row("floor", *((self.split.floor, column.wall) for column in columns))
        for part in self.split.breakdown():
            yield self._row(part, *((column.breakdown()[part], column.wall) for column in columns))
        yield f"largest: {self.split.largest}; {self.host_gap.text()}"
        yield (
            f"idle: {self.trace.idle_share:.1%} of the trace by its own clock, "
            f"{1 - self.split.busy / self.split.wall:.1%} of the call without the profiler"
        )
        yield from self.trace.lines()

    @staticmethod
    def _row(name: str, *parts: tuple[float, float]) -> str:
        return f"{name:20}" + "".join(f"{part:10.3f} s {part / wall:7.1%}" for part, wall in parts)
