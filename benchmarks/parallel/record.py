"""The file of what has been measured: a line as each measurement ends, so that an interrupted run can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from benchmarks.parallel.plan import RanksMeasurement


@dataclass(frozen=True)
class Record:
    """What came of one measurement. seconds: of its process. results: the lines that the process printed, as its
    command documents them. fault: why there are none."""

    measurement: RanksMeasurement
    seconds: float
    commit: str | None
    results: list[dict[str, Any]] = field(default_factory=list)
    fault: str | None = None

    def line(self) -> str:
        known = {"seconds": round(self.seconds, 2), "commit": self.commit, "results": self.results, "fault": self.fault}
        return json.dumps(self.measurement.values() | known)


def append(file: Path, record: Record) -> None:
    """Write the line of a measurement, on a line of its own even behind one that an interruption cut."""
    with file.open("a+b") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
        before = stream.read(1)
        stream.write(b"\n" * (before not in (b"", b"\n")) + record.line().encode() + b"\n")


def read(file: Path) -> list[Record]:
    """The lines of a file; one that an interruption cut is as if it were not there. Empty if there is no file."""
    if not file.exists():
        return []
    return [found for line in file.read_text(encoding="utf-8").splitlines() if (found := _record(line)) is not None]


def measured(records: Iterable[Record], commit: str | None) -> dict[RanksMeasurement, Record]:
    """The newest line of each measurement that `commit` has and that came to an end."""
    return {one.measurement: one for one in records if one.fault is None and one.commit == commit}


def _record(line: str) -> Record | None:
    try:
        values = json.loads(line)
        measurement = RanksMeasurement(*(values[field.name] for field in fields(RanksMeasurement)))
        return Record(measurement, *(values[name] for name in ("seconds", "commit", "results", "fault")))
    except (ValueError, TypeError, KeyError):
        return None
