"""Where the time of a served load went: of the wall time, and of each request's first and later tokens.

Pure arithmetic on when steps ran and tokens were delivered, all in seconds of one clock.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from strata.bench.load.measures import percentile
from strata.bench.result import HostGap
from strata.bench.trace import covered, merged
from strata.hardware.roofline import Workload
from strata.plan.explain.measurement import StepChunk

TTFT_PARTS = ("queueing until launched", "behind earlier steps", "prefill steps", "between steps", "delivery")
TPOT_PARTS = ("decode steps", "steps with prompts", "between steps", "delivery")
# The requests whose parts stand for a percentile: those whose rank is so near to it, as a share of all.
_NEAR = {0.5: 0.05, 0.99: 0.01}


@dataclass(frozen=True)
class ServedStep:
    """launched: when the host began to enqueue it. begin, end: of its work on the device."""

    launched: float
    begin: float
    end: float
    chunks: tuple[StepChunk, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def has_prompts(self) -> bool:
        """Whether it runs more than one token of any sequence."""
        return any(chunk.tokens > 1 for chunk in self.chunks)

    @property
    def workload(self) -> Workload:
        return Workload(
            tuple(chunk.tokens for chunk in self.chunks), tuple(chunk.start + chunk.tokens for chunk in self.chunks)
        )

    @property
    def draws(self) -> int:
        return sum(chunk.draws for chunk in self.chunks)

    @property
    def size(self) -> tuple[bool, int]:
        """Steps of one size take about as long: whether prompts are in it, and its tokens up to a power of two."""
        return self.has_prompts, 1 << (self.workload.tokens - 1).bit_length()


@dataclass(frozen=True)
class ServedRequest:
    """sequence: its id in the steps. due: when it came. times: when each of its tokens was delivered, at least one."""

    sequence: int
    due: float
    times: tuple[float, ...]


@dataclass(frozen=True)
class RequestSplit:
    """Seconds of one request, each by its part.

    ttft: from its arrival to its first token; adds up to that. tpot: from the first token to the last, divided by the
    tokens after the first; None of a single token.
    """

    ttft: dict[str, float]
    tpot: dict[str, float] | None


@dataclass(frozen=True)
class LatencySplit:
    """Milliseconds. p50, p99: of all requests. parts: of each its mean over all requests (`mean`), and over those whose
    latency is next to a percentile (`p50`: the middle tenth, `p99`: the slowest fiftieth)."""

    p50: float
    p99: float
    parts: dict[str, dict[str, float]]


@dataclass(frozen=True)
class WallSplit:
    """Seconds from the first arrival to the last token: wall = idle + steps + host.

    idle: no request was there, and no step ran. steps: one ran. host: requests were there and none ran.
    """

    wall: float
    idle: float
    steps: float
    host: float
    host_gap: HostGap


@dataclass(frozen=True)
class StepKind:
    """Steps of one kind. seconds, floor, busy: of all of them together; the floor is None if it is not known.
    median: seconds of one. sequences, tokens: of one on average."""

    steps: int
    seconds: float
    floor: float | None
    busy: float
    median: float
    sequences: float
    tokens: float


def split_requests(steps: Sequence[ServedStep], requests: Iterable[ServedRequest]) -> list[RequestSplit]:
    """The parts of each request's latencies. steps: in the order in which they ran.

    Raises ValueError for a request whose tokens no step drew.
    """
    holding: dict[int, list[ServedStep]] = defaultdict(list)
    drawing: dict[int, list[ServedStep]] = defaultdict(list)
    for step in steps:
        for chunk in step.chunks:
            holding[chunk.sequence].append(step)
            if chunk.draws:
                drawing[chunk.sequence].append(step)
    return [_split_request(one, holding[one.sequence], drawing[one.sequence]) for one in requests]


def _split_request(
    request: ServedRequest, holding: Sequence[ServedStep], drawing: Sequence[ServedStep]
) -> RequestSplit:
    if not drawing:
        raise ValueError(f"sequence {request.sequence} was delivered {len(request.times)} tokens that no step drew")
    first, last = drawing[0], drawing[-1]
    entered = holding[0]
    prefill = [step for step in holding if step.end <= first.end]
    decode = [step for step in holding if first.end < step.end <= last.end]
    prefilling = math.fsum(step.seconds for step in prefill)
    alone = math.fsum(step.seconds for step in decode if not step.has_prompts)
    shared = math.fsum(step.seconds for step in decode if step.has_prompts)
    ttft = (
        entered.launched - request.due,
        entered.begin - entered.launched,
        prefilling,
        first.end - entered.begin - prefilling,
        request.times[0] - first.end,
    )
    between = last.end - first.end - alone - shared
    delivery = (request.times[-1] - last.end) - (request.times[0] - first.end)
    after_first = len(request.times) - 1
    tpot = None
    if after_first:
        parts = (alone, shared, between, delivery)
        tpot = {name: part / after_first for name, part in zip(TPOT_PARTS, parts, strict=True)}
    return RequestSplit(dict(zip(TTFT_PARTS, ttft, strict=True)), tpot)


def latency_split(parts: Sequence[Mapping[str, float]]) -> LatencySplit:
    """Of the parts of at least one request each."""
    ordered = sorted(parts, key=lambda one: math.fsum(one.values()))
    totals = [1e3 * math.fsum(one.values()) for one in ordered]
    groups = {"mean": ordered, "p50": _near(ordered, 0.5), "p99": _near(ordered, 0.99)}
    return LatencySplit(
        percentile(totals, 0.5),
        percentile(totals, 0.99),
        {
            part: {name: 1e3 * statistics.fmean(one[part] for one in group) for name, group in groups.items()}
            for part in ordered[0]
        },
    )


def _near(ordered: Sequence[Mapping[str, float]], share: float) -> list[Mapping[str, float]]:
    """Those whose rank is near a share of all; the nearest if none is near enough."""
    away = [abs((rank + 0.5) / len(ordered) - share) for rank in range(len(ordered))]
    most = max(_NEAR[share], min(away))
    return [one for one, distance in zip(ordered, away, strict=True) if distance <= most]


def split_wall(steps: Sequence[ServedStep], requests: Sequence[ServedRequest]) -> WallSplit:
    """steps: in the order in which they ran; what lies outside the wall time does not count."""
    first = min(request.due for request in requests)
    last = max(request.times[-1] for request in requests)
    there = merged((request.due, request.times[-1]) for request in requests)
    ran = [(max(step.begin, first), min(step.end, last)) for step in steps if step.begin < last and step.end > first]
    running, used = covered(ran), covered([*there, *ran])
    wall = last - first
    return WallSplit(wall, wall - used, running, used - running, _host_gap(steps, there))


def _host_gap(steps: Sequence[ServedStep], there: Sequence[tuple[float, float]]) -> HostGap:
    """Of the gaps between steps in all of which requests were there."""
    seconds = []
    for before, after in pairwise(steps):
        at = bisect_right(there, before.end, key=lambda one: one[0]) - 1
        if at >= 0 and there[at][1] >= after.begin:
            seconds.append(after.begin - before.end)
    seconds.sort()
    return HostGap(percentile(seconds, 0.5), percentile(seconds, 0.99)) if seconds else HostGap(0.0, 0.0)


def busy_seconds(steps: Sequence[ServedStep], traced: Iterable[tuple[tuple[bool, int], float]]) -> list[float]:
    """How long kernels ran in each step, from what was seen of traced ones: their sizes and seconds.

    A step has the mean of its size; where the trace has none of its size, the share of all others.
    """
    seen: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for size, seconds in traced:
        seen[size].append(seconds)
    means = {size: statistics.fmean(found) for size, found in seen.items()}
    sizes = [step.size for step in steps]
    known = [(step.seconds, means[size]) for step, size in zip(steps, sizes, strict=True) if size in means]
    whole = math.fsum(seconds for seconds, _ in known)
    share = math.fsum(busy for _, busy in known) / whole if whole else 1.0
    return [means.get(size, share * step.seconds) for step, size in zip(steps, sizes, strict=True)]


def step_kinds(
    steps: Sequence[ServedStep], floors: Sequence[float] | None, busy: Sequence[float]
) -> dict[str, StepKind]:
    """floors, busy: seconds of each step."""
    found = {}
    for name, has_prompts in (("decodes alone", False), ("with prompts", True)):
        chosen = [index for index, step in enumerate(steps) if step.has_prompts == has_prompts]
        if not chosen:
            continue
        seconds = [steps[index].seconds for index in chosen]
        found[name] = StepKind(
            len(chosen),
            math.fsum(seconds),
            None if floors is None else math.fsum(floors[index] for index in chosen),
            math.fsum(busy[index] for index in chosen),
            statistics.median(seconds),
            statistics.fmean(len(steps[index].chunks) for index in chosen),
            statistics.fmean(steps[index].workload.tokens for index in chosen),
        )
    return found
