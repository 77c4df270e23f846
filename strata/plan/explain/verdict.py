"""From what was found in a run, and where its time goes, to the verdict: alike for runs that serve and that train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from strata.engine.watch.verdict import NEAR, Remedy, Verdict
from strata.plan.explain.explanation import Explained, LostTime
from strata.plan.report.units import share

# What saves less is no bottleneck.
MIN_GAIN = 0.03


@dataclass(frozen=True)
class Finding(Verdict):
    """One cause and what would help. change: what the first remedy changes of an engine's options, so that it can be
    tried; None if no option does it. options: the same of the engine's facts. replaces: steps measured under the change
    stand in for those of the run."""

    change: Mapping[str, Any] | None = None
    options: Mapping[str, int | bool] = field(default_factory=dict)
    replaces: bool = False

    def tried(self, gain: float, evidence: str) -> Finding:
        """With what a probe found."""
        first, *others = self.remedies
        return replace(self, remedies=(replace(first, gain=gain), *others), evidence=(*self.evidence, evidence))


def ranked(found: Iterable[Finding]) -> list[Finding]:
    """Those that would save anything, the greatest gain first."""
    first = (replace(one, remedies=_by_gain(one.remedies)) for one in found)
    return sorted((one for one in first if one.gain > 0), key=lambda one: one.gain, reverse=True)


def verdict(
    explained: Explained,
    found: Sequence[Finding],
    evidence: Iterable[str],
    otherwise: Iterable[Remedy] = (),
    least: float = MIN_GAIN,
) -> Verdict:
    """Of the first finding, if it saves at least so much; else what keeps the run from its floor of which no option is
    known, or that it is near.

    found: as `ranked` gives it. evidence: of the run as a whole. otherwise: what would help where nothing was found.
    """
    remedies = list(chain.from_iterable(one.remedies for one in found))
    if found and found[0].gain >= least:
        first = found[0]
        return Verdict(first.layer, first.symptom, first.cause, (*first.evidence, *evidence), _worth(remedies))
    fall = explained.waterfall
    largest = max(fall.parts, key=lambda part: part.seconds, default=None)
    worth = _worth([*remedies, *otherwise])
    if largest is None or fall.floor > NEAR * fall.measured:
        symptom = f"near the floor: {fall.floor / fall.measured:.0%} of the time is the least"
        return Verdict("kernel", symptom, explained.bound, tuple(evidence), worth)
    told = f"{largest.name}: {share(largest.seconds, fall.measured)} of the time"
    return Verdict(largest.layer, _symptom(largest), largest.cause, (told, *evidence), worth)


def _symptom(part: LostTime) -> str:
    if part.layer == "kernel":
        return f"busy but slow: {part.name}"
    return f"low utilization: {part.name}" if part.cause in ("host", "launch") else part.name


def _worth(remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    return tuple(_different(one for one in _by_gain(remedies) if one.gain >= MIN_GAIN))


def _by_gain(remedies: Iterable[Remedy]) -> tuple[Remedy, ...]:
    return tuple(sorted(remedies, key=lambda one: one.gain, reverse=True))


def _different(remedies: Iterable[Remedy]) -> Iterator[Remedy]:
    """The same option may help against two causes."""
    seen: set[str] = set()
    for one in remedies:
        if (key := one.option or one.what) not in seen:
            seen.add(key)
            yield one
