"""Which rank holds up the others: found from what each was doing when the run stood still."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from strata.comm.observer import CollectiveCall

# A heartbeat so many intervals old says that its rank cannot even write any more.
_MISSED_BEATS = 3.0


@dataclass(frozen=True)
class Heartbeat:
    """What a rank was doing.

    step: counted from 1; 0 before the first. phase: of the step. seconds: without progress. time: when this was noted,
    seconds since 1970. hangs: whether the rank has found that it makes no progress. waits: the collective that its host
    waits for. last: the newest collective along each axis. recent: the newest ones, oldest first, if it hangs.
    """

    rank: int
    step: int
    phase: str
    seconds: float
    time: float
    hangs: bool
    waits: CollectiveCall | None
    last: tuple[CollectiveCall, ...]
    recent: tuple[CollectiveCall, ...]

    @property
    def place(self) -> str:
        return f"at step {self.step}, {self.phase}"


def diagnose(beats: Sequence[Heartbeat | None], now: float, interval: float) -> str:
    """One line for a person, naming the ranks that hold up the others.

    beats: the newest heartbeat of each rank, None for one that never wrote any. now: as `Heartbeat.time`. interval:
    seconds between the heartbeats of a rank that still lives.
    """
    silent = [rank for rank, beat in enumerate(beats) if beat is None or _is_silent(beat, now, interval)]
    known = {beat.rank: beat for beat in beats if beat is not None and beat.rank not in silent}
    if silent:
        return f"{_silence(silent, beats, now)}{_waiting(known.values())}"
    if late := _latest(known):
        return late
    free = [rank for rank, beat in known.items() if beat.waits is None]
    if free and len(free) < len(known):
        return f"{_places(known, free)}, in no collective{_waiting(known.values())}"
    steps = {beat.step for beat in known.values()}
    if len(steps) > 1:
        behind = [rank for rank, beat in known.items() if beat.step == min(steps)]
        return f"{_places(known, behind)}; the others are at step {max(steps)}"
    newest = max((call for beat in known.values() for call in beat.last), key=lambda call: call.number, default=None)
    same = "" if newest is None else f", and all have entered the same collectives, up to {_named(newest)}"
    where = _places(known, list(known))
    return f"{where}{same}: if no rank computes, a device or the network stands still"


def _is_silent(beat: Heartbeat, now: float, interval: float) -> bool:
    return not beat.hangs and now - beat.time > _MISSED_BEATS * interval


def _silence(silent: Sequence[int], beats: Sequence[Heartbeat | None], now: float) -> str:
    beat = beats[silent[0]]
    if beat is None:
        return f"{_ranks(silent)} never wrote a heartbeat"
    return (
        f"{_ranks(silent)} last wrote a heartbeat {now - beat.time:.0f} s ago, {beat.place}: frozen, or its machine is "
        f"out of reach"
    )


def _latest(known: Mapping[int, Heartbeat]) -> str:
    """About the ranks that never entered a collective that others along the axis have; "" if there are none."""
    counts: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, beat in known.items():
        for call in beat.last:
            line = counts.setdefault((call.axis, call.ranks), {one: 0 for one in call.ranks if one in known})
            line[rank] = call.number
    found: list[tuple[bool, bool, CollectiveCall, list[int]]] = []
    for key, line in counts.items():
        number = min(line.values()) + 1
        behind = [rank for rank, count in line.items() if count < number]
        if missed := _find(known.values(), key, number):
            excused = all(known[rank].waits is not None for rank in behind)
            unawaited = all(beat.waits != missed for beat in known.values())
            found.append((excused, unawaited, missed, behind))
    if not found:
        return ""
    # Best a rank that waits for nobody, missed in a collective that others wait for.
    _, _, missed, behind = min(found, key=lambda one: one[:2])
    ahead = [rank for rank in missed.ranks if rank in known and rank not in behind]
    return (
        f"{_places(known, behind)}, and never entered {_named(missed)} "
        f"that {_ranks(ahead)} {_verb(ahead, 'waits', 'wait')} in"
    )


def _find(beats: Iterable[Heartbeat], key: tuple[str, tuple[int, ...]], number: int) -> CollectiveCall | None:
    for beat in beats:
        for call in (*beat.recent, *beat.last):
            if (call.axis, call.ranks) == key and call.number == number:
                return call
    return None


def _waiting(beats: Iterable[Heartbeat]) -> str:
    """What the others wait in, to end a sentence."""
    by_call: dict[CollectiveCall, list[int]] = {}
    for beat in beats:
        if beat.waits is not None:
            by_call.setdefault(beat.waits, []).append(beat.rank)
    parts = [f"{_ranks(ranks)} {_verb(ranks, 'waits', 'wait')} in {_named(call)}" for call, ranks in by_call.items()]
    return "".join(f"; {part}" for part in parts)


def _places(known: Mapping[int, Heartbeat], ranks: Sequence[int]) -> str:
    """Where these ranks are; those in one place together."""
    by_place: dict[str, list[int]] = {}
    for rank in ranks:
        by_place.setdefault(known[rank].place, []).append(rank)
    return ", ".join(f"{_ranks(ones)} {_verb(ones, 'is', 'are')} {place}" for place, ones in by_place.items())


def _named(call: CollectiveCall) -> str:
    return f"{call.operation} {call.number} of {call.axis!r} ({call.nbytes} bytes)"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _ranks(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 4] as "ranks 0-2, 4"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
