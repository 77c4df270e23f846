"""When the step ahead is launched: so late that it has what comes meanwhile, so early that no device idles."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Listed
from dataclasses import dataclass

from strata.engine.plan import StepPlan

# Of each size of a step the last durations are kept, and of each kind of step the host's last times of a launch.
KEPT = 16
# Before so many are known, nothing is put off.
LEAST = 3
# How much earlier than expected a step may end, in seconds and as a share of its duration.
MARGIN, MARGIN_SHARE = 0.1e-3, 0.02


@dataclass(frozen=True)
class StepReads:
    """Which work of a step follows from its lengths, not from its size. keys: tokens that its sequences read; pairs: of
    queries and keys of its prompts."""

    keys: int
    pairs: float

    @staticmethod
    def of(plan: StepPlan) -> StepReads:
        keys = sum([chunk.start for chunk in plan.chunks]) + plan.tokens
        if plan.tokens == len(plan.chunks):
            return StepReads(keys, 0.0)
        return StepReads(keys, sum([chunk.count * (chunk.start + chunk.count / 2) for chunk in plan.chunks]))

    def share_of(self, other: StepReads) -> float:
        """The least share of the time of a step that reads `other` in which one of the same size reads this: 1 if this
        is not less, since a time grows with what is read, by at most as much as that does."""
        keys = self.keys / other.keys if other.keys else 1.0
        pairs = self.pairs / other.pairs if other.pairs else 1.0
        return min(1.0, keys, pairs)


@dataclass(frozen=True)
class _Step:
    """begin: on the device, as the host saw it; `is_exact` if it was with the end of the step before."""

    size: Hashable | None
    reads: StepReads
    begin: float
    is_exact: bool


class LateLaunch:
    """Learns how long steps and launches take, and says until when the next launch can wait.

    A step runs on the device while the host waits to launch the next one. It is expected to take at least as long as
    the shortest of the last that had its size: only captured steps have one. The host begins earlier by the time that
    it needed lately, the second longest of each kind of step, because an arrival may turn decodes into a step with
    prompts. A step that ends before the next is launched has been misjudged: what was known of its size is forgotten.

    clock: of the host, in seconds. behind: by how many seconds other ranks, which the device waits for, may launch
    later than this one.
    """

    def __init__(self, clock: Callable[[], float], behind: float = 0.0) -> None:
        self._clock, self._behind = clock, behind
        self._durations: dict[Hashable, deque[tuple[float, StepReads]]] = {}
        self._launches: dict[bool, deque[float]] = {}  # by whether a step has prompts
        self._running: _Step | None = None
        self._next: _Step | None = None
        self._due = -math.inf
        self._waited = False

    def remaining(self) -> float:
        """Seconds for which the next launch can wait; 0 if it is due."""
        return max(0.0, self._due - self._clock())

    def wait(self) -> float:
        """What remains, for a caller who will wait: by how much that is late, counts as time of the launch."""
        self._waited = True
        return self.remaining()

    def launched(self, plan: StepPlan, size: Hashable | None, began: float, alone: bool) -> None:
        """A step has just been launched. size: what steps have that do the same work, but for their lengths; None is
        of no other step. began: when the host began to plan it. alone: no other is under way."""
        took = self._clock() - (min(self._due, began) if self._waited else began)
        self._launches.setdefault(plan.tokens > len(plan.chunks), deque(maxlen=KEPT)).append(took)
        self._next = _Step(size, StepReads.of(plan), began, is_exact=False)
        if alone:
            self._begin(self._next)

    def completed(self, in_time: bool) -> None:
        """The ids of the step that ran have just come. in_time: the next was launched, if at all, before it ended."""
        now, before, after = self._clock(), self._running, self._next
        if before is not None and before.size is not None:
            if not in_time:
                self._durations.pop(before.size, None)
            elif before.is_exact:
                known = self._durations.setdefault(before.size, deque(maxlen=KEPT))
                known.append((now - before.begin, before.reads))
        if after is not None and in_time:
            after = _Step(after.size, after.reads, now, is_exact=before is not None)
        self._begin(after)

    @property
    def is_steady(self) -> bool:
        """Whether the step that runs began when the one before it ended."""
        return self._running is not None and self._running.is_exact

    def repeated(self, ends: Listed[float], more_keys: int, took: float) -> None:
        """As if steps of the size of the one that runs had been launched one after another, each in time, and each was
        waited for. ends: of the one that runs and of those behind it but for the last, which runs now. more_keys: that
        each reads more than the one before. took: the host's seconds of each launch."""
        before = self._running
        assert before is not None, "no step runs that others could be like"
        keys = before.reads.keys
        if before.size is not None:
            known = self._durations.setdefault(before.size, deque(maxlen=KEPT))
            if before.is_exact:
                known.append((ends[0] - before.begin, before.reads))
            first = max(1, len(ends) - KEPT)
            known.extend(
                (ends[at] - ends[at - 1], StepReads(keys + at * more_keys, 0.0)) for at in range(first, len(ends))
            )
        self._launches.setdefault(False, deque(maxlen=KEPT)).extend([took] * min(KEPT, len(ends)))
        self._begin(_Step(before.size, StepReads(keys + len(ends) * more_keys, 0.0), ends[-1], is_exact=True))

    def forget_under_way(self) -> None:
        """Something else runs on the device, or nothing any more."""
        self._begin(None)

    def _begin(self, step: _Step | None) -> None:
        self._running, self._next, self._waited = step, None, False
        self._due = -math.inf if step is None else self._latest(step)

    def _latest(self, step: _Step) -> float:
        """When to launch the step behind this one."""
        expected, lead = self._expected(step), self._lead()
        if expected is None or lead is None:
            return -math.inf
        return step.begin + (1 - MARGIN_SHARE) * expected - MARGIN - self._behind - lead

    def _expected(self, step: _Step) -> float | None:
        known = self._durations.get(step.size, ()) if step.size is not None else ()
        if len(known) < LEAST:
            return None
        reads, whole, part = step.reads, math.inf, math.inf
        keys, pairs = reads.keys, reads.pairs
        for seconds, other in known:
            if keys >= other.keys and pairs >= other.pairs:
                if seconds < whole:
                    whole = seconds
            elif whole == math.inf:
                part = min(part, reads.share_of(other) * seconds)
        return whole if whole < math.inf else part

    def _lead(self) -> float | None:
        """The host's seconds of a launch, whichever step it turns out to be."""
        if sum(map(len, self._launches.values())) < LEAST:
            return None
        return max(sorted(times)[-2:][0] for times in self._launches.values())
