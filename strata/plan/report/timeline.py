"""The steps of a run over time: when the device worked on what, and how much each step held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strata.plan.explain.explanation import StepTime
from strata.plan.report.units import seconds, share

COLUMNS = 240
# A step without a kind is one of training.
KINDS = ("decode", "mixed", "prompt", "training")


@dataclass(frozen=True)
class Timeline:
    """Equal columns of time from the first step's begin to the last one's end.

    busy: by kind, which share of each column its steps cover. tokens, sequences, kv: of a step, the most in a column.
    """

    begin: float
    end: float
    busy: dict[str, list[float]]
    tokens: list[int]
    sequences: list[int]
    kv: list[float]


def kind_of(step: StepTime) -> str:
    """Its kind by name."""
    return step.kind or "training"


def timeline(steps: Sequence[StepTime], columns: int = COLUMNS) -> Timeline:
    """The columns of a run of at least one step."""
    begin, end = min(step.begin for step in steps), max(step.end for step in steps)
    width = (end - begin) / columns or 1.0
    busy: dict[str, list[float]] = defaultdict(lambda: [0.0] * columns)
    tokens, sequences, kv = [0] * columns, [0] * columns, [0.0] * columns
    for step in steps:
        first = min(int((step.begin - begin) / width), columns - 1)
        last = min(int((step.end - begin) / width), columns - 1)
        for column in range(first, last + 1):
            low = begin + column * width
            busy[kind_of(step)][column] += max(0.0, min(step.end, low + width) - max(step.begin, low)) / width
            tokens[column] = max(tokens[column], step.tokens)
            sequences[column] = max(sequences[column], step.sequences)
            kv[column] = max(kv[column], step.kv or 0.0)
    return Timeline(begin, end, {kind: busy[kind] for kind in KINDS if kind in busy}, tokens, sequences, kv)


class Panel(NamedTuple):
    """A picture of the timeline. most: what its full height is. label: in words. paths: (class, path), in a picture of
    a column's width each and of height 100."""

    name: str
    most: str
    label: str
    paths: list[tuple[str, str]]


def panels(found: Timeline) -> list[Panel]:
    """Above one axis: share of each instant that steps cover; of a step tokens, sequences and KV memory."""
    below, paths = [0.0] * len(found.tokens), []
    for kind, shares in found.busy.items():
        above = [min(1.0, low + one) for low, one in zip(below, shares, strict=True)]
        paths.append((f"kind {kind}", _area(below, above)))
        below = above
    made = [Panel("device busy", "100 %", "how much of the time steps run, by kind", paths)]
    amounts: tuple[tuple[str, Sequence[float], str], ...] = (
        ("tokens of a step", found.tokens, f"{max(found.tokens):,}"),
        ("sequences of a step", found.sequences, f"{max(found.sequences):,}"),
        ("KV memory in use", found.kv, f"{max(found.kv):.1%}"),
    )
    for name, values, most in amounts:
        if max(values):
            area = _area([0.0] * len(values), [one / max(values) for one in values])
            made.append(Panel(name, most, f"{name}, at most {most}", [("amount", area)]))
    return made


def timeline_text(steps: Sequence[StepTime]) -> str:
    """The same in words."""
    span = max(step.end for step in steps) - min(step.begin for step in steps)
    told = []
    for kind in KINDS:
        of_kind = [step for step in steps if kind_of(step) == kind]
        if of_kind:
            taken = sum(step.end - step.begin for step in of_kind)
            counted = f"{len(of_kind):,} {kind} step{'s' if len(of_kind) > 1 else ''}"
            told.append(f"{counted} of {seconds(taken / len(of_kind))} on average ({share(taken, span)} of the time)")
    return f"In {seconds(span)}: {', '.join(told)}."


def _area(low: list[float], high: list[float]) -> str:
    """Bars side by side as one path, in a picture of height 100."""
    bars = (
        f"M{column} {100 - 100 * below:.1f}V{100 - 100 * above:.1f}h1V{100 - 100 * below:.1f}z"
        for column, (below, above) in enumerate(zip(low, high, strict=True))
        if above > below
    )
    return "".join(bars)
