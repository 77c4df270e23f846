"""The requests of a run once more through the engine's own scheduler, under other options: what these would change."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler
from strata.hardware.roofline import Workload
from strata.plan.explain.measurement import EngineFacts, MeasuredRequest, MeasuredStep, StepChunk

_ID = 1  # what every draw gives: requests end by their length


@dataclass(frozen=True)
class Replayed:
    """Seconds of the virtual clock. wall: from the first request to the last token. steps: all of them, from there too.
    host: processor seconds of the scheduler here for a step, the median. times: of each request's tokens, by the clock
    that `due` is of."""

    wall: float
    steps: tuple[MeasuredStep, ...]
    host: float
    preemptions: int
    times: tuple[tuple[float, ...], ...]
    due: tuple[float, ...]

    @property
    def latencies(self) -> list[float]:
        """From each request's arrival to its last token."""
        return [times[-1] - due for times, due in zip(self.times, self.due, strict=True)]

    @property
    def gaps(self) -> list[float]:
        """Between two tokens of a request, all of them, ascending."""
        return sorted(after - before for one in self.times for before, after in pairwise(one))


def replay(
    requests: Sequence[MeasuredRequest], facts: EngineFacts, seconds: Callable[[Workload], float], between: float
) -> Replayed:
    """facts: the engine's, as far as its scheduler knows them. seconds: of a step. between: seconds between two steps.
    Each request gets as many tokens as it got.

    Raises ValueError for a request that does not fit into the pages at all.
    """
    pages = PageAllocator(facts.kv_tokens // facts.page_size, facts.page_size)
    config = SchedulerConfig(facts.slots, facts.step_tokens, facts.max_length)
    scheduler = Scheduler(config, pages, PrefixTree(pages) if facts.caches_prefixes else None)
    waiting = sorted(range(len(requests)), key=lambda index: requests[index].due)
    start = now = requests[waiting[0]].due
    times: list[list[float]] = [[] for _ in requests]
    host, last = [0.0], 0
    steps: list[MeasuredStep] = []
    while last < len(waiting) or scheduler.has_work:
        while last < len(waiting) and requests[waiting[last]].due <= now:
            scheduler.add(_request(waiting[last], requests[waiting[last]]))
            last += 1
        began = time.thread_time()
        plan = scheduler.schedule()
        host.append(time.thread_time() - began)
        if plan is None:
            if last == len(waiting):
                raise ValueError("the scheduler stands still: a request does not fit into the KV pages")
            now = max(now, requests[waiting[last]].due)
            continue
        chunks = tuple(StepChunk(one.sequence, one.start, one.count, len(one.draws)) for one in plan.chunks)
        begun = MeasuredStep(now - start, now - start, chunks)
        took = seconds(begun.workload)
        steps.append(replace(begun, end=begun.begin + took))
        now += took + between
        began = time.thread_time()
        updates = scheduler.complete(plan, [_ID] * len(plan.draws))
        host[-1] += time.thread_time() - began
        for update in updates:
            times[int(update.sequence.request.id)] += [now] * len(update.tokens)
    preempted = scheduler.statistics.preemptions
    return Replayed(
        now - start,
        tuple(steps),
        statistics.median(host),
        preempted,
        tuple(tuple(one) for one in times),
        tuple(one.due for one in requests),
    )


def _request(index: int, measured: MeasuredRequest) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=measured.outputs, ignore_eos=True)
    return Request(str(index), measured.prompt, params, arrival=measured.due)
