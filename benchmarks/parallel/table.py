"""What was measured over ranks, in words: each figure beside that of one GPU and its floor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rich.table import Table

from benchmarks.parallel.plan import RanksMeasurement
from benchmarks.parallel.record import Record
from strata.bench.result import number

_PER_SECOND = "tok/s"


def words(record: Record) -> str:
    """What came of a measurement, in a line."""
    said = record.fault if record.fault is not None else _figures(record)
    return f"{record.measurement.text()}: {said}; {record.seconds:.0f} s"


def tests_table(records: Mapping[RanksMeasurement, Record]) -> Table:
    """Tests of engines: figure, floor, share of its speed, and how many times as fast as one rank."""
    table = Table(title="Engines over ranks", title_justify="left")
    for name in ("model", "test", "ranks", "value", "unit", "times one rank", "floor", "share"):
        table.add_column(name, justify="left" if name in ("model", "test", "unit") else "right", no_wrap=True)
    for measurement, record in records.items():
        if measurement.model is None or not record.results:
            continue
        result = record.results[-1]
        experts = " ep" if measurement.expert_parallel else ""
        floor = result["floor"]
        table.add_row(
            measurement.model,
            measurement.test,
            f"{measurement.ranks}{experts}",
            number(result["value"]),
            result["unit"],
            _times_one(result, records.get(replace(measurement, ranks=1, expert_parallel=False))),
            "-" if floor is None else number(floor),
            "-" if floor is None else f"{_speed(result, 'value') / _speed(result, 'floor'):.0%}",
        )
    return table


def messages_table(records: Iterable[Record]) -> Table:
    """Messages alone: of each size and number of ranks the quickest algorithm, and a library's beside it."""
    table = Table(title="Messages", title_justify="left")
    for name in ("message", "bytes", "ranks", "algorithm", "us", "model of a library", "floor"):
        table.add_column(name, justify="left" if name in ("message", "algorithm") else "right", no_wrap=True)
    for record in records:
        if record.measurement.model is not None:
            continue
        quickest: dict[tuple[str, int], dict[str, Any]] = {}
        for result in record.results:
            key = result["operation"], result["bytes"]
            if key not in quickest or result["value"] < quickest[key]["value"]:
                quickest[key] = result
        for (operation, size), result in quickest.items():
            known = ("-" if result[name] is None else number(result[name]) for name in ("model", "floor"))
            ranks, taken = str(record.measurement.ranks), number(result["value"])
            table.add_row(operation, f"{size:,}", ranks, result["algorithm"], taken, *known)
    return table


def _figures(record: Record) -> str:
    if record.measurement.model is None:
        return f"{len(record.results)} figures"
    result = record.results[-1]
    return f"{number(result['value'])} {result['unit']}"


def _times_one(result: Mapping[str, Any], one: Record | None) -> str:
    """How many times as fast as on one rank; "-" where that was not measured."""
    if one is None or not one.results:
        return "-"
    return f"{_speed(result, 'value') / _speed(one.results[-1], 'value'):.2f}"


def _speed(result: Mapping[str, Any], name: str) -> float:
    """A figure of which more is better."""
    value = float(result[name])
    return value if result["unit"] == _PER_SECOND else 1 / value
