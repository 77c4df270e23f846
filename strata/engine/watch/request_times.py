"""Keeps a ledger of each request while the engine runs it, at a cost that does not grow with those that decode.

All that decode share their steps. So what steps take is added to sums of the engine, and a sequence notes these when it
begins to decode, or to wait, and takes the difference when it stops. Only those whose prompts are under way are looked
at in every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from strata.engine.loop import StepTiming
from strata.engine.plan import RankPlans, StepPlan
from strata.engine.request import Sequence
from strata.engine.scheduling.config import HOLDUPS
from strata.engine.watch.request_ledger import Part, RequestLedger, ended_at
from strata.engine.watch.step_shares import StepLook

# Ledgers of requests that have ended, the newest, are kept for whoever asks: about 3 KB each, however long it ran.
KEPT = 1024
# Of requests that share a name, the newest are told: it is done between two steps, and all would take as long as one.
MAX_TOLD = 128

# The sums: of steps' parts, of their floors and numbers, and of waiting by rank and cause behind them.
_GAP, _MASKS, _DECODE, _BESIDE, _FLOOR, _STEPS, _SEQUENCES = range(7)
_HELD = 7
_DECODING: tuple[tuple[int, Part], ...] = (
    (_GAP, "host_gap"),
    (_MASKS, "masks"),
    (_DECODE, "decode"),
    (_BESIDE, "decode_beside"),
)


class Arrival(NamedTuple):
    """When a request's head had come, it was submitted, the engine read it, and queued it: seconds of its clock."""

    began: float
    submitted: float
    read: float
    queued: float


@dataclass(slots=True, eq=False)
class _Times:
    """Of one sample. mark: the sums when it began to decode or to wait; None before, and while its prompt runs.
    preempted: since when it waits, if that is why."""

    sequence: Sequence
    arrival: Arrival
    parts: dict[Part, float]
    mark: list[float] | None = None
    decodes: bool = False
    preempted: float | None = None
    first_token: float | None = None
    first_parts: dict[Part, float] | None = None
    prompt_steps: int = 0
    decode_steps: float = 0.0
    beside: float = 0.0
    floor: float = 0.0

    def add(self, part: Part, seconds: float) -> None:
        if seconds > 0.0:
            self.parts[part] = self.parts.get(part, 0.0) + seconds


@dataclass(slots=True, eq=False)
class _Request:
    """left: samples that have not ended. newest: ledger of the sample that ended last; None until then."""

    names: tuple[str, ...]
    samples: Listed[Sequence]
    arrival: Arrival
    left: int
    newest: RequestLedger | None = None


class RequestTimes:
    """The ledgers of an engine's requests, those that run and the last that have ended.

    Told in this order: requests as they are queued, each step as it ends, then the samples that have ended with it.
    Requests go by the scheduler's ids; names are what clients ask for.
    """

    def __init__(self, *, has_floor: bool, ranks: int = 1, kept: int = KEPT) -> None:
        """has_floor: steps have one. ranks: with sequences of their own."""
        self._has_floor, self._ranks, self._kept = has_floor, ranks, kept
        self._sums = [0.0] * (_HELD + ranks * len(HOLDUPS))
        self._last = 0.0  # the end of the last step
        self._recomputed = 0.0
        self._arrived: list[_Times] = []  # since the plan of the last step was made
        self._times: dict[int, _Times] = {}  # by sequence
        self._prompts: dict[int, _Times] = {}  # those of them whose prompts are under way
        self._requests: dict[str, _Request] = {}
        self._ended: OrderedDict[str, _Request] = OrderedDict()
        self._names: dict[str, list[str]] = {}

    def queued(self, id: str, names: Listed[str], samples: Listed[Sequence], arrival: Arrival) -> None:
        """A request is in the engine's queue."""
        self._requests[id] = _Request(tuple(names), samples, arrival, len(samples))
        for name in names:
            self._names.setdefault(name, []).append(id)
        times = self._times[samples[0].id] = _Times(samples[0], arrival, {})
        times.add("text", arrival.submitted - arrival.began)
        times.add("inbox", arrival.read - arrival.submitted)
        times.add("grammar", arrival.queued - arrival.read)
        self._arrived.append(times)

    def step(self, timing: StepTiming, look: StepLook) -> tuple[float, float, float]:
        """A step has ended. Returns seconds: for which the device had nothing to do before it although requests were
        there; of the step; and those of it with tokens that were computed before."""
        plan, ended, last = timing.plan, timing.ended, self._last
        begin = min(max(timing.launched, last), ended)
        arrived = [one for one in self._arrived if one.arrival.queued <= timing.planned]
        alive = len(self._times) > len(self._arrived)
        since = last if alive else min([one.arrival.queued for one in arrived], default=begin)
        if arrived:
            self._arrived = [one for one in self._arrived if one.arrival.queued > timing.planned]
        for held in timing.waiting:
            for id in held.preempted:
                self._preempt(id)
        for new in _new_sequences(plan):
            self._start(new)
        gap, masks = max(0.0, begin - since), min(ended - begin, timing.drawing)
        work = ended - begin - masks
        for one in arrived:
            self._arrive(one, timing)
        floor = 0.0 if look.floor is None else look.floor.seconds
        before = self._recomputed
        drew = self._run_prompts(plan, begin, ended, masks, floor) if self._prompts else []
        sums = self._sums
        sums[_GAP] += gap
        sums[_MASKS] += masks
        sums[_DECODE] += work * (1.0 - look.prompts)
        sums[_BESIDE] += work * look.prompts
        sums[_FLOOR] += floor
        sums[_STEPS] += 1
        sums[_SEQUENCES] += len(plan.chunks)
        for rank, held in enumerate(timing.waiting):
            if held.holdup is not None:
                sums[_HELD + rank * len(HOLDUPS) + HOLDUPS.index(held.holdup)] += ended - last
        for one in arrived:
            if one.sequence.id not in self._prompts:
                one.mark = list(sums)
        self._last = ended
        for one, drawn in drew:
            self._begin_decode(one, drawn)
        return gap, ended - begin, self._recomputed - before

    def sample_ended(self, sequence: Sequence, now: float | None = None) -> None:
        """A sample has ended with the last step or, if it was broken off, `now`."""
        id = sequence.request.id
        request = self._requests.get(id)
        if request is None:
            return
        times = self._times.get(sequence.id)
        if times is not None:
            self._fork(request, times, frozenset())
            request.newest = self._ledger(times, self._last if now is None else now)
            self._forget(sequence.id)
        request.left -= 1
        if not request.left:
            self._keep(id, request)

    def request_ended(self, id: str, now: float) -> None:
        """It was broken off, whatever samples it still had."""
        request = self._requests.get(id)
        if request is None:
            return
        for sample in request.samples:
            times = self._times.get(sample.id)
            if times is not None:
                request.newest = self._ledger(times, now)
                self._forget(sample.id)
        self._keep(id, request)

    def delivered(self, name: str, ended: float) -> None:
        """The last text of the newest request of that name, which has ended here, was ready at `ended`."""
        request = self._ended.get(self._names.get(name, [""])[-1])
        if request is None or request.newest is None:
            return
        seconds = max(0.0, ended - request.arrival.began)
        parts = ended_at(request.newest.parts, request.newest.seconds, seconds)
        request.newest = msgspec.structs.replace(request.newest, parts=parts, seconds=seconds)

    def ledgers(self, name: str, now: float) -> list[RequestLedger]:
        """Of the newest requests of that name, in their order; none if there is no such request, or not any more."""
        ids = self._names.get(name, [])[-MAX_TOLD:]
        return [ledger for id in ids if (ledger := self._find(id, now)) is not None]

    def _find(self, id: str, now: float) -> RequestLedger | None:
        request = self._requests.get(id)
        if request is None:
            return self._ended[id].newest
        running = [self._times[sample.id] for sample in request.samples if sample.id in self._times]
        return self._ledger(running[0], now) if running else request.newest

    def _arrive(self, times: _Times, timing: StepTiming) -> None:
        """The first step that was planned since it came."""
        queued = times.arrival.queued
        times.add("step_under_way", self._last - queued)
        if times.sequence.id not in self._prompts:
            held = timing.waiting[times.sequence.id % self._ranks] if timing.waiting else None
            cause = held.holdup if held is not None else None
            times.add(cause or "step_full", timing.ended - max(self._last, queued))

    def _start(self, id: int) -> None:
        """It takes a slot in the step that is told."""
        times = self._times.get(id)
        if times is not None:  # another sample of a request has none before it has forked
            self._take(times)
            times.mark = times.preempted = None
            self._prompts[id] = times

    def _preempt(self, id: int) -> None:
        times = self._times.get(id)
        if times is not None:
            self._take(times)
            self._prompts.pop(id, None)
            times.decodes, times.preempted, times.mark = False, self._last, list(self._sums)

    def _run_prompts(
        self, plan: StepPlan, begin: float, ended: float, masks: float, floor: float
    ) -> list[tuple[_Times, frozenset[int]]]:
        """Returns those whose prompts are through, and the samples that have drawn from them."""
        drew, behind = [], set(self._prompts)
        for chunk in plan.chunks:
            times = self._prompts.get(chunk.sequence)
            if times is None:
                continue
            behind.discard(chunk.sequence)
            work = ended - begin - masks
            own = work * chunk.count / plan.tokens
            times.add("host_gap", begin - max(self._last, times.arrival.queued))
            times.add("masks", masks)
            if times.sequence.preemptions:
                times.add("recomputed", own)
                self._recomputed += own
            else:
                times.add("prompt", own)
            times.add("prompt_beside", work - own)
            times.prompt_steps += 1
            times.floor += floor
            if chunk.draws:
                drew.append((times, frozenset(draw.sequence for draw in chunk.draws)))
        for id in behind:
            self._prompts[id].add("step_full", ended - self._last)
        return drew

    def _begin_decode(self, times: _Times, drawn: frozenset[int]) -> None:
        self._prompts.pop(times.sequence.id, None)
        has_token = len(times.sequence.tokens) > times.sequence.prompt_length  # not if no id could be drawn
        if times.first_token is None and has_token:
            times.first_token, times.first_parts = self._last - times.arrival.began, dict(times.parts)
        times.decodes, times.mark = True, list(self._sums)
        request = self._requests.get(times.sequence.request.id)
        if request is not None:
            self._fork(request, times, drawn)

    def _fork(self, request: _Request, times: _Times, drawn: frozenset[int]) -> None:
        """Other samples that have no times of their own yet go on from those of one; those that have not drawn wait."""
        for sample in request.samples:
            if sample.id not in self._times and not sample.finished:
                self._times[sample.id] = replace(
                    times,
                    sequence=sample,
                    parts=dict(times.parts),
                    decodes=sample.id in drawn,
                    mark=list(self._sums),
                )

    def _take(self, times: _Times) -> None:
        """Add what the sums have grown by since it noted them."""
        if times.mark is None:
            return
        grown = [now - before for now, before in zip(self._sums, times.mark, strict=True)]
        times.mark = list(self._sums)
        if times.decodes:
            for at, part in _DECODING:
                times.add(part, grown[at])
            times.floor += grown[_FLOOR]
            times.decode_steps += grown[_STEPS]
            times.beside += grown[_SEQUENCES]
        elif times.preempted is not None:
            times.add("preempted", self._last - times.preempted)
            times.preempted = self._last
        else:
            first = _HELD + times.sequence.id % self._ranks * len(HOLDUPS)
            for at, cause in enumerate(HOLDUPS, first):
                times.add(cause, grown[at])

    def _ledger(self, times: _Times, until: float) -> RequestLedger:
        """As it stands, `until` then; what it does goes on."""
        # What came since the last step was planned has not been looked at in it.
        since = times.arrival.queued if times in self._arrived else max(self._last, times.arrival.queued)
        times = replace(times, parts=dict(times.parts))
        self._take(times)
        times.add("step_under_way", until - since)
        sequence = times.sequence
        return RequestLedger(
            seconds=sum(times.parts.values()),
            parts=times.parts,
            first_token=times.first_token,
            first_parts=times.first_parts or {},
            finish_reason=sequence.finish_reason,
            prompt_tokens=sequence.prompt_length,
            cached_tokens=sequence.cached_tokens,
            output_tokens=len(sequence.tokens) - sequence.prompt_length,
            prompt_steps=times.prompt_steps,
            decode_steps=round(times.decode_steps),
            beside=times.beside / times.decode_steps if times.decode_steps else 0.0,
            preemptions=sequence.preemptions,
            floor=times.floor if self._has_floor else None,
        )

    def _forget(self, sequence: int) -> None:
        times = self._times.pop(sequence)
        self._prompts.pop(sequence, None)
        if times in self._arrived:
            self._arrived.remove(times)

    def _keep(self, id: str, request: _Request) -> None:
        """Of a request that has ended, nothing but its ledger."""
        del self._requests[id]
        request.samples = ()
        self._ended[id] = request
        while len(self._ended) > self._kept:
            old, dropped = self._ended.popitem(last=False)
            for name in dropped.names:
                self._names[name].remove(old)
                if not self._names[name]:
                    del self._names[name]


def _new_sequences(plan: StepPlan) -> Iterator[int]:
    parts = plan.parts if isinstance(plan, RankPlans) else (plan,)
    return (new.id for part in parts for new in part.new)
