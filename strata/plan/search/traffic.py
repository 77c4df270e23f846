"""What is asked of a server: lengths of prompts and answers, what of them is cached, and how quick it is to be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strata.files.request_rows import read_rows
from strata.text.counted import counted


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
            raise ValueError(
                f"--input-len {prompt} and --output-len {output}: prompts and answers have at least one token"
            )
        if not 0 <= cached < prompt:
            raise ValueError(
                f"--cached {cached}: of a prompt of {counted(prompt, 'token')} at least one is computed; "
                f"give 0 to {prompt - 1}"
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


def read_traffic(path: Path, cached: int = 0) -> Traffic:
    """The means of a JSON-lines trace (`input_length`, `output_length`, `timestamp`), as `strata bench serve` replays.

    cached: of each prompt. Raises ValueError, naming the line at fault, for a trace that is empty, not in the order of
    its timestamps, or in another form.
    """
    rows = read_rows(path, ordered=True, needed=("input_length", "output_length"))
    lengths = [(row.input_length or 0, row.output_length or 0) for row in rows]
    shortest = min(prompt for prompt, _ in lengths)
    if not 0 <= cached < shortest:
        raise ValueError(
            f"--cached {cached}: the shortest prompt of {path} has {counted(shortest, 'token')}, of which one at least "
            f"is computed; give 0 to {shortest - 1}"
        )
    outputs = sum(output for _, output in lengths)
    context = sum(output * (prompt + output / 2) for prompt, output in lengths) / outputs
    times = [row.timestamp for row in rows if row.timestamp is not None]
    seconds = (times[-1] - times[0]) / 1e3 if len(times) == len(rows) else 0.0
    return Traffic(
        sum(prompt for prompt, _ in lengths) / len(rows),
        outputs / len(rows),
        cached,
        context,
        max(prompt + output for prompt, output in lengths),
        (len(rows) - 1) / seconds if seconds > 0 else None,
    )
