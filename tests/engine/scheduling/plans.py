"""Schedulers whose plans are read, and requests for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import StepPlan
from strata.engine.request import Request, Sequence
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.scheduler import Scheduler


class NamingScheduler(Scheduler):
    """Remembers to which request each id of a sequence belongs, since plans hold ids alone."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.names: dict[int, str] = {}

    def add(self, request: Request, matcher: Any = None) -> list[Sequence]:
        added = super().add(request, matcher)
        self.names.update((sequence.id, request.id) for sequence in added)
        return added


def scheduler(
    pages: int = 100, page_size: int = 4, slots: int = 8, budget: int = 64, longest: int = 100, caching: bool = True
) -> NamingScheduler:
    config, allocator = SchedulerConfig(slots, budget, longest), PageAllocator(pages, page_size)
    return NamingScheduler(config, allocator, PrefixTree(allocator) if caching else None)


def request(
    id: str, prompt: Iterable[int] | int, *, priority: int = 0, arrival: float = 0.0, **params: object
) -> Request:
    """`prompt` as a number is that many ids, which requests of another initial do not share."""
    first = 1000 * ord(id[0])
    ids = tuple(range(first, first + prompt)) if isinstance(prompt, int) else tuple(prompt)
    return Request(id, ids, SamplingParams(**params), priority, arrival, eos_ids=frozenset([0]))  # type: ignore[arg-type]


def shares(of: NamingScheduler, plan: StepPlan | None) -> list[tuple[str, int, int]]:
    assert plan is not None
    return [(of.names[chunk.sequence], chunk.start, chunk.count) for chunk in plan.chunks]


def step(of: Scheduler, token: int = 7) -> StepPlan | None:
    """A step that is completed before the next is planned."""
    plan = of.schedule()
    if plan is not None:
        of.complete(plan, [token] * len(plan.draws))
    return plan


def finish(of: Scheduler) -> Iterator[StepPlan]:
    while of.has_work:
        plan = step(of)
        assert plan is not None
        yield plan
