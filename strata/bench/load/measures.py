"""The figures of a load: latencies as they are distributed, throughput, goodput, and what went wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from strata.bench.load.send import RequestOutcome


def ttft(outcome: RequestOutcome) -> float:
    """Time to first token: seconds from sending the request to the first text. For a good outcome."""
    return outcome.times[0] - outcome.sent


def tpot(outcome: RequestOutcome) -> float | None:
    """Time per output token: seconds from the first text to the last over the tokens after the first; None for one."""
    after_first = outcome.output_tokens - 1
    return (outcome.times[-1] - outcome.times[0]) / after_first if after_first else None


def e2e(outcome: RequestOutcome) -> float:
    """End to end: seconds from sending the request to the end of its answer."""
    return outcome.ended - outcome.sent


# Turns behind this share of the most that a session has had in its context are late ones.
LATE_TURNS = 0.75
# What a goodput may bound.
OBJECTIVES = {"ttft": ttft, "tpot": tpot, "e2e": e2e}


@dataclass(frozen=True)
class Distribution:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution | None:
        """None of nothing."""
        ordered = sorted(1e3 * value for value in seconds)
        if not ordered:
            return None
        return cls(math.fsum(ordered) / len(ordered), *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True)
class Goodput:
    """Requests that met all of `objectives` (most milliseconds by name): a second, and as a share of those sent."""

    objectives: dict[str, float]
    requests_per_second: float
    share: float


@dataclass(frozen=True)
class Figures:
    """What one load came to.

    seconds: from the first request sent to the last answer's end. faults: requests that failed, by kind;
    fault_messages: what was said of the first of each kind; lost: those of them that ended without a word from the
    server (cut off, timed out, no connection). chunks: parts that the text came in, fewer than the tokens where several
    came at once. ttft, tpot, itl, e2e: of the good requests; itl is the time between two chunks. send_lag: how late
    requests were sent, which is the load generator's own fault or, with bounded concurrency, the server's.
    first_turns_ttft, late_turns_ttft: of the turns of sessions that begin a context, and of those behind three quarters
    of the turns of the longest; None without sessions.
    """

    requests: int
    completed: int
    faults: dict[str, int]
    fault_messages: dict[str, str]
    lost: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    chunks: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    send_lag_ms: Distribution | None
    goodput: Goodput | None
    first_turns_ttft_ms: Distribution | None = None
    late_turns_ttft_ms: Distribution | None = None


def figures(outcomes: Sequence[RequestOutcome], objectives: Mapping[str, float]) -> Figures:
    """Of all outcomes of a load. objectives: most milliseconds of "ttft", "tpot", "e2e"; none for no goodput."""
    good = [outcome for outcome in outcomes if outcome.fault is None]
    faults = [outcome.fault for outcome in outcomes if outcome.fault is not None]
    messages: dict[str, str] = {}
    for fault in faults:
        messages.setdefault(fault.kind, fault.message)
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    shown = [outcome for outcome in good if outcome.times]
    late = LATE_TURNS * max(outcome.turn for outcome in outcomes)
    return Figures(
        requests=len(outcomes),
        completed=len(good),
        faults=dict(Counter(fault.kind for fault in faults)),
        fault_messages=messages,
        lost=sum(fault.lost for fault in faults),
        seconds=seconds,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chunks=sum(len(outcome.times) for outcome in good),
        requests_per_second=len(good) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt_tokens + output_tokens) / seconds,
        ttft_ms=Distribution.of(ttft(outcome) for outcome in shown),
        tpot_ms=Distribution.of(value for outcome in shown if (value := tpot(outcome)) is not None),
        itl_ms=Distribution.of(after - before for outcome in shown for before, after in pairwise(outcome.times)),
        e2e_ms=Distribution.of(e2e(outcome) for outcome in good),
        send_lag_ms=Distribution.of(max(0.0, outcome.sent - outcome.due) for outcome in outcomes),
        goodput=_goodput(outcomes, objectives, seconds) if objectives else None,
        first_turns_ttft_ms=Distribution.of(ttft(outcome) for outcome in shown if outcome.turn == 1),
        late_turns_ttft_ms=Distribution.of(ttft(outcome) for outcome in shown if outcome.turn > late),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of rising values are at most, between two of them in proportion (as numpy's "linear")."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def parse_objectives(text: str) -> dict[str, float]:
    """Most milliseconds by name, from "ttft:200 tpot:15" (commas do as well)."""
    found: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        name, _, value = word.partition(":")
        try:
            most = float(value)
        except ValueError:
            most = math.nan
        if name not in OBJECTIVES or not most > 0:
            raise ValueError(
                f"--goodput takes {', '.join(OBJECTIVES)} with milliseconds, like 'ttft:200 tpot:15'; got {word!r}"
            )
        found[name] = most
    return found


def _goodput(outcomes: Sequence[RequestOutcome], objectives: Mapping[str, float], seconds: float) -> Goodput:
    met = sum(_meets(outcome, objectives) for outcome in outcomes)
    return Goodput(dict(objectives), met / seconds, met / len(outcomes))


def _meets(outcome: RequestOutcome, objectives: Mapping[str, float]) -> bool:
    if outcome.fault is not None or not outcome.times:
        return False
    values = ((OBJECTIVES[name](outcome), most) for name, most in objectives.items())
    return all(value is None or 1e3 * value <= most for value, most in values)
