"""What is asked of a server: lengths of prompts and answers, what of them is cached, and how quick it is to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from strata.files.json_object import why_no_json


@dataclass(frozen=True)
class Traffic:
    """Mean lengths in tokens. prompt: with its `cached` first tokens, which the prefix cache holds. context: that an
    answer's token looks back on, mean of all of them. longest: prompt and answer of the longest request. rate: requests
    a second, None if it is not known.
    """

    prompt: float
    output: float
    cached: float
    context: float
    longest: int
    rate: float | None = None

    @staticmethod
    def of(prompt: int, output: int, cached: int = 0) -> Traffic:
        """Of requests that are all alike. Raises ValueError for lengths that none can have."""
        if prompt < 1 or output < 1:
            raise ValueError(f"--isl {prompt} and --osl {output}: prompts and answers have at least one token")
        if not 0 <= cached < prompt:
            raise ValueError(
                f"--cached {cached}: of a prompt of {prompt} tokens at least one is computed; give 0 to {prompt - 1}"
            )
        return Traffic(prompt, output, cached, prompt + output / 2, prompt + output)

    @property
    def computed(self) -> float:
        """Tokens of a prompt that are not cached."""
        return self.prompt - self.cached


@dataclass(frozen=True)
class Objectives:
    """Most seconds, as means of a load: ttft from a request to its first token, tpot of each token after that. None:
    as long as it takes."""

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--ttft", self.ttft), ("--tpot", self.tpot)):
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} {value * 1e3:g}: give milliseconds, more than 0")


class _Row(msgspec.Struct, frozen=True):
    """One line of a trace; other fields are ignored. timestamp: milliseconds, as in the traces of Mooncake."""

    input_length: int
    output_length: int
    timestamp: float | None = None


def read_traffic(path: Path, cached: int = 0) -> Traffic:
    """The means of a JSON-lines trace (`input_length`, `output_length`, `timestamp`), as `strata bench serve` replays.

    cached: of each prompt. Raises ValueError, naming the line at fault, for a trace that is empty, not in the order of
    its timestamps, or in another form.
    """
    rows = list(_rows(path))
    if not rows:
        raise ValueError(f"{path} has no requests: give a trace with one JSON object a line")
    shortest = min(row.input_length for row in rows)
    if not 0 <= cached < shortest:
        raise ValueError(
            f"--cached {cached}: the shortest prompt of {path} has {shortest} tokens, of which one at least is "
            f"computed; give 0 to {shortest - 1}"
        )
    outputs = sum(row.output_length for row in rows)
    context = sum(row.output_length * (row.input_length + row.output_length / 2) for row in rows) / outputs
    times = [row.timestamp for row in rows if row.timestamp is not None]
    seconds = (times[-1] - times[0]) / 1e3 if len(times) == len(rows) else 0.0
    return Traffic(
        sum(row.input_length for row in rows) / len(rows),
        outputs / len(rows),
        cached,
        context,
        max(row.input_length + row.output_length for row in rows),
        (len(rows) - 1) / seconds if seconds > 0 else None,
    )


def _rows(path: Path) -> Iterable[_Row]:
    before: float | None = None
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = msgspec.json.decode(line, type=_Row)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, {why_no_json(line, error, number)}") from None
        if row.input_length < 1 or row.output_length < 1:
            raise ValueError(f"{where}: input_length and output_length are tokens, 1 or more")
        if row.timestamp is not None:
            if before is not None and row.timestamp < before:
                raise ValueError(
                    f"{where}: timestamp {row.timestamp:g} is before that of the line above; sort the trace"
                )
            before = row.timestamp
        yield row
