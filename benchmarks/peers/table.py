"""Tables of both engines side by side, in Markdown, from a file of `offline_in_turns` and `serve_in_turns`.

    python -m benchmarks.peers.table benchmarks/results/h200_peers.jsonl

Each row is of one run of both engines, the newest that measured it with both; each figure is the median of its turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import ENGINES, NAMES
from strata.bench.result import number

# Figures that differ by less than this share of the larger one are level.
LEVEL = 0.01

# What is read of every line, of one of a served load, and of others.
_EVERY = ("test", "model", "run", "turn", "version", "device", "date", "commit")
_SERVED = ("load", "ttft_ms", "tpot_ms", "output_tokens_per_second", "requests", "completed")
_OFFLINE = ("dtype", "unit", "value")

Line = dict[str, Any]


@dataclass(frozen=True)
class Metric:
    """A figure of a line. `read` gives None where a line has none. everywhere: its column stands even if none has."""

    name: str
    read: Callable[[Line], float | None]
    more_is_better: bool
    everywhere: bool = True


@dataclass(frozen=True)
class Row:
    """A test or load in one run. lines: of each engine that ran it, one a turn."""

    name: str
    lines: dict[str, list[Line]]

    def figures(self, metric: Metric) -> dict[str, float]:
        """Of each engine that has one, the median of its turns."""
        found = {}
        for engine, lines in self.lines.items():
            values = [value for line in lines if (value := metric.read(line)) is not None]
            if values:
                found[engine] = statistics.median(values)
        return found

    def cell(self, metric: Metric) -> str:
        """Both engines' figures, like "3.5 / 10.6"."""
        found = self.figures(metric)
        return " / ".join(number(found[engine]) if engine in found else "-" for engine in ENGINES)

    def leader(self, metric: Metric) -> str | None:
        """The engine with the better figure; None if they are level."""
        found = self.figures(metric)
        if len(found) < len(ENGINES) or max(found.values()) - min(found.values()) <= LEVEL * max(found.values()):
            return None
        return (max if metric.more_is_better else min)(found, key=lambda engine: found[engine])

    def ahead(self, metrics: Sequence[Metric]) -> str:
        """Who leads, in which of the metrics if not one engine in all where they are not level."""
        if len(self.lines) < len(ENGINES):
            return f"only {NAMES[next(iter(self.lines))]} ran"
        leading: dict[str, list[str]] = {}
        for metric in metrics:
            leader = self.leader(metric)
            if leader is not None:
                leading.setdefault(leader, []).append(metric.name)
        if len(leading) < 2:
            return NAMES[next(iter(leading))] if leading else "level"
        return "; ".join(f"{NAMES[engine]}: {', '.join(leading[engine])}" for engine in ENGINES)

    def failures(self) -> str:
        """Which engine failed requests, and how many of how many."""
        told = []
        for engine, lines in self.lines.items():
            asked, completed = (sum(line[name] for line in lines) for name in ("requests", "completed"))
            if completed < asked:
                told.append(f" ({NAMES[engine]} failed {asked - completed:,} of {asked:,} requests)")
        return "".join(told)


def latency(name: str, share: str) -> Callable[[Line], float | None]:
    """Reads a figure of a latency in milliseconds, which a load without a good answer has not, nor one without turns
    that of turns."""
    return lambda line: (line.get(name) or {}).get(share)


SERVED = (
    Metric("TTFT mean", latency("ttft_ms", "mean"), more_is_better=False, everywhere=False),
    Metric("TTFT p50", latency("ttft_ms", "p50"), more_is_better=False),
    Metric("TTFT p99", latency("ttft_ms", "p99"), more_is_better=False),
    Metric("first turns' p50", latency("first_turns_ttft_ms", "p50"), more_is_better=False, everywhere=False),
    Metric("late turns' p50", latency("late_turns_ttft_ms", "p50"), more_is_better=False, everywhere=False),
    Metric("TPOT p50", latency("tpot_ms", "p50"), more_is_better=False),
    Metric("tok/s", lambda line: line["output_tokens_per_second"], more_is_better=True),
)


def served_table(found: Iterable[Row]) -> Iterator[str]:
    """The loads on servers; latencies in milliseconds. What not every load has is a column if one has it."""
    shown = list(found)
    metrics = [metric for metric in SERVED if metric.everywhere or any(row.figures(metric) for row in shown)]
    yield f"| load | {' | '.join(metric.name for metric in metrics)} | ahead |"
    yield "|---" * (len(metrics) + 2) + "|"
    for row in shown:
        cells = " | ".join(row.cell(metric) for metric in metrics)
        yield f"| {row.name} | {cells} | {row.ahead(metrics)}{row.failures()} |"


def offline_table(found: Iterable[Row]) -> Iterator[str]:
    """T1 to T4."""
    yield "| test | figure | ahead |"
    yield "|---|---|---|"
    for row in found:
        rate = row.name.endswith("tok/s")
        metric = Metric("figure", lambda line: line["value"], more_is_better=rate)
        leader, figures = row.leader(metric), row.figures(metric).values()
        lead = "" if leader is None else f" by {max(figures) / min(figures) - 1:.1%}"
        yield f"| {row.name} | {row.cell(metric)} | {row.ahead([metric])}{lead} |"


def tables(lines: Sequence[Line]) -> str:
    """Both tables, each under what its figures are of; a table without lines is left out."""
    parts = []
    for served, table in ((False, offline_table), (True, served_table)):
        chosen = newest([line for line in lines if (line["test"] == "T5") is served])
        if chosen:
            parts.append("\n".join([source(chosen), "", *table(rows(chosen))]))
    return "\n\n".join(parts)


def newest(lines: Sequence[Line]) -> list[Line]:
    """The lines of each row's last run of both engines; where none has both, of its last run."""
    ran: dict[tuple[str, str], set[str]] = {}
    for line in lines:
        ran.setdefault((row_name(line), line["run"]), set()).add(line["engine"])
    runs: dict[str, str] = {}
    for (row, run), of_engines in ran.items():
        if len(of_engines) == len(ENGINES) or len(ran.get((row, runs.get(row, run)), ())) < len(ENGINES):
            runs[row] = run
    return [line for line in lines if line["run"] == runs[row_name(line)]]


def rows(lines: Iterable[Line]) -> list[Row]:
    """In the order in which they first come."""
    found: dict[str, dict[str, list[Line]]] = {}
    for line in lines:
        found.setdefault(row_name(line), {}).setdefault(line["engine"], []).append(line)
    return [Row(name, of_engine) for name, of_engine in found.items()]


def row_name(line: Line) -> str:
    """What is measured: a load on a model, or a test with its unit. Lines of one GPU need not say so, nor those of
    weights as they are, nor those for which each engine drew its own."""
    ranks, quantization = line.get("tensor_parallel_size", 1), line.get("quantization")
    model = line["model"] if ranks == 1 else f"{line['model']} on {ranks} GPUs"
    if line.get("weights") == "saved":
        model = f"{model} with saved weights"
    if line["test"] == "T5":
        return f"{model}{f' in {quantization}' if quantization else ''}, {line['load']}"
    return f"{line['test']} {model} {line['dtype']}, {line['unit']}"


def source(lines: Sequence[Line]) -> str:
    """Where figures come from, in a sentence."""

    def every(name: str, engine: str | None = None) -> str:
        found = dict.fromkeys(str(line[name]) for line in lines if engine in (None, line["engine"]))
        return ", ".join(found) or "did not run"

    commits = ", ".join(dict.fromkeys((line["commit"] or "unknown")[:7] for line in lines))
    counts = {len(of_engine) for row in rows(lines) for of_engine in row.lines.values()}
    turns = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return (
        f"Strata {every('version', 'strata')} (commit {commits}) / vLLM {every('version', 'vllm')}, in turns on one "
        f"machine ({every('device')}, {every('date')}); turns of each, whose medians stand here: {turns}; "
        f"figures within {LEVEL:.0%} are level."
    )


def read(path: Path) -> list[Line]:
    """The lines of a results file. Raises ValueError for a line that is no result of a comparison."""
    lines = []
    for count, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {count}: not JSON ({error})") from None
        if not isinstance(line, dict) or line.get("engine") not in ENGINES:
            raise ValueError(f"{path}, line {count}: no result of offline_in_turns or serve_in_turns")
        missing = [name for name in (*_EVERY, *(_SERVED if line.get("test") == "T5" else _OFFLINE)) if name not in line]
        if missing:
            raise ValueError(
                f"{path}, line {count}: no result of offline_in_turns or serve_in_turns: no {', '.join(missing)}"
            )
        lines.append(line)
    if not lines:
        raise ValueError(f"{path} has no results")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a file that offline_in_turns and serve_in_turns have saved to")
    try:
        print(tables(read(parser.parse_args().results)))
    except (OSError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
