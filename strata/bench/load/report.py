"""What a load came to, as a line of JSON and as tables in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from strata.bench.load.measures import Distribution, Figures
from strata.bench.result import number, provenance
from strata.text.counted import counted

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
# Of sessions alone.
TURN_LATENCIES = {"first_turns_ttft_ms": "TTFT of first turns", "late_turns_ttft_ms": "TTFT of late turns"}

# Sent more than this late (milliseconds, p99), the load was not the one that was asked for.
MAX_LAG = 10.0


@dataclass(frozen=True)
class LoadResult:
    """One load and its figures.

    started: when the sweep that it belongs to began (UTC). model: as the server names it. data: the data set in words.
    request_rate: requests a second that were offered, infinite if all came at once, None if a trace or the turns of
    sessions said when.
    saturation: requests a second that the server sustained in a closed loop, if the rate is a share of it.
    max_concurrency: most requests under way, None for no bound.
    """

    started: str
    model: str
    data: str
    request_rate: float | None
    saturation: float | None
    burstiness: float
    max_concurrency: int | None
    seed: int
    figures: Figures

    def values(self) -> dict[str, Any]:
        """As one object, with where it came from; an infinite rate is "inf", which JSON has no number for."""
        values = {"test": "T5", **asdict(self)}
        figures = values.pop("figures")
        if self.request_rate is not None and math.isinf(self.request_rate):
            values["request_rate"] = "inf"
        return {**values, **figures, **provenance()}

    def offered(self) -> str:
        """Requests a second, and the share of saturation."""
        if self.request_rate is None:
            return "at their own times"
        if math.isinf(self.request_rate):
            return "all at once"
        share = ""
        if self.saturation is not None:
            share = f" ({self.request_rate / self.saturation:.0%} of {number(self.saturation)})"
        return f"{number(self.request_rate)}{share}"

    def shown(self) -> Group:
        """Latencies, and around them load, throughput, goodput and what went wrong."""
        table = Table("ms")
        for name in ("mean", "p50", "p90", "p99"):
            table.add_column(name, justify="right")
        for field, name in LATENCIES.items():
            table.add_row(name, *_cells(getattr(self.figures, field)))
        for field, name in TURN_LATENCIES.items():
            if getattr(self.figures, field) is not None:
                table.add_row(name, *_cells(getattr(self.figures, field)))
        bound = "" if self.max_concurrency is None else f", at most {self.max_concurrency} under way"
        return Group(f"{self.model}, {self.data}", f"offered/s: {self.offered()}{bound}", table, *self._lines())

    def _lines(self) -> Iterator[str]:
        figures = self.figures
        faults = ", ".join(f"{count} {kind}" for kind, count in figures.faults.items())
        failed = f"; failed: {faults} ({figures.lost} lost)" if faults else ""
        seconds = f"{figures.seconds:,.1f}" if figures.seconds >= 10 else number(figures.seconds)
        yield f"{figures.completed:,} of {counted(figures.requests, 'request')} completed in {seconds} s{failed}"
        for kind, message in figures.fault_messages.items():
            yield f"{kind}: {escape(message)}"
        requests, output = number(figures.requests_per_second), number(figures.output_tokens_per_second)
        a_chunk = figures.output_tokens / max(1, figures.chunks)
        total = number(figures.total_tokens_per_second)
        yield f"{requests} requests/s, {output} output tok/s ({a_chunk:.3g} a chunk), {total} with prompts"
        if self.saturation is not None and self.request_rate == math.inf:
            yield f"saturation {number(self.saturation)} requests/s, without the first and the last requests under way"
        if figures.goodput is not None:
            bounds = ", ".join(f"{name} <= {most:g} ms" for name, most in figures.goodput.objectives.items())
            good = figures.goodput
            yield f"goodput {number(good.requests_per_second)} requests/s ({good.share:.1%} of requests): {bounds}"
        if figures.send_lag_ms is not None and self.max_concurrency is None and figures.send_lag_ms.p99 > MAX_LAG:
            yield f"sent up to {figures.send_lag_ms.p99:.0f} ms late (p99): the load generator is the bottleneck"


def sweep_table(results: Sequence[LoadResult]) -> Table:
    """Latencies of several rates, one row each."""
    table = Table(title="Latency (ms) against load", title_justify="left")
    for name in ("offered/s", "done/s", "tok/s", "TTFT p50", "p99", "TPOT p50", "p99", "goodput", "failed"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        figures = result.figures
        table.add_row(
            result.offered(),
            number(figures.requests_per_second),
            number(figures.output_tokens_per_second),
            *_ends(figures.ttft_ms),
            *_ends(figures.tpot_ms),
            "-" if figures.goodput is None else f"{figures.goodput.share:.1%}",
            str(figures.requests - figures.completed),
        )
    return table


def _cells(times: Distribution | None) -> list[str]:
    return ["-"] * 4 if times is None else [f"{value:.2f}" for value in asdict(times).values()]


def _ends(times: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if times is None else (f"{times.p50:.1f}", f"{times.p99:.1f}")
