"""Ranks that have sequences of their own: a scheduler for each of them, and which of them gets a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import NOTHING, RankPlans, StepPlan, TransferEnd
from strata.engine.request import Request, Sequence, Update
from strata.engine.routing.router import Route, Router
from strata.engine.scheduling.config import SchedulerConfig, Statistics, Waiting
from strata.engine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True)
class RankPages:
    """The KV pages of all ranks, each of which has its own."""

    parts: tuple[PageAllocator, ...]

    @property
    def num_pages(self) -> int:
        """Of all ranks together."""
        return sum(part.num_pages for part in self.parts)

    @property
    def page_size(self) -> int:
        return self.parts[0].page_size

    @property
    def usage(self) -> float:
        """The share of the pages that sequences hold, in [0, 1]."""
        return sum(part.usage for part in self.parts) / len(self.parts)


def _of_parts(name: str, join: Callable[[Iterable[Any]], Any]) -> property:
    return property(lambda self: join(getattr(part, name) for part in self._parts))


class RankSchedulers:
    """A `Scheduler` to its caller, and one for each rank inside: slots, pages and prefix tree are a rank's own.

    A request stays on the rank that it is given to, where `Router` finds the least to compute: that which holds the
    most of its prefix, unless another has less to do by more than that saves. A step is a plan for each rank.
    """

    def __init__(self, config: SchedulerConfig, num_pages: int, page_size: int, *, caches: bool) -> None:
        """config, num_pages: of each of `config.ranks` ranks. caches: they keep prefixes."""
        self.pages = RankPages(tuple(PageAllocator(num_pages, page_size) for _ in range(config.ranks)))
        self._parts = tuple(
            Scheduler(replace(config, rank=rank), pages, PrefixTree(pages) if caches else None)
            for rank, pages in enumerate(self.pages.parts)
        )
        self._caches = caches
        self._forget()

    def _forget(self) -> None:
        self._router = Router(one.num_pages * one.page_size for one in self.pages.parts)
        self._routes: dict[str, Route] = {}
        self._unbegun: set[str] = set()  # requests that have no id yet

    @property
    def config(self) -> SchedulerConfig:
        """Of each rank, but for its number."""
        return self._parts[0].config

    @config.setter
    def config(self, config: SchedulerConfig) -> None:
        for rank, part in enumerate(self._parts):
            part.config = replace(config, rank=rank)

    @property
    def statistics(self) -> Statistics:
        """Of all ranks together; setting them begins anew."""
        names = [one.name for one in fields(Statistics)]
        return Statistics(**{name: sum(getattr(part.statistics, name) for part in self._parts) for name in names})

    @statistics.setter
    def statistics(self, statistics: Statistics) -> None:
        for part in self._parts:
            part.statistics = replace(statistics)

    # As `Scheduler` has them, of all ranks together.
    max_sequences = _of_parts("max_sequences", sum)
    running = _of_parts("running", sum)
    waiting = _of_parts("waiting", sum)
    waiting_tokens = _of_parts("waiting_tokens", sum)
    has_work = _of_parts("has_work", any)
    needs_known_ids = _of_parts("needs_known_ids", any)
    has_space = _of_parts("has_space", any)

    def take_waiting(self) -> tuple[Waiting, ...]:
        return tuple(held for part in self._parts for held in part.take_waiting())

    def sequence(self, id: int) -> Sequence | None:
        return self._of(id).sequence(id)

    def rank_of(self, request_id: str) -> int | None:
        """Which rank has an unfinished request."""
        route = self._routes.get(request_id)
        return None if route is None else route.replica

    def add(self, request: Request, matcher: LLMatcher | None = None) -> list[Sequence]:
        """As `Scheduler.add`, on the rank that has the least to compute."""
        if request.id in self._routes:
            raise ValueError(f"request id {request.id!r} is in use by an unfinished request: choose another")
        request.max_length(self.config.max_length, self.pages.parts[0])  # no route for what can never run
        caches = self._caches and request.params.prompt_logprobs is None
        route = self._router.route(request.prompt, str(request.extra_key), samples=request.params.n, caches=caches)
        try:
            sequences = self._parts[route.replica].add(request, matcher)
        except BaseException:
            self._router.ended(route)
            raise
        self._routes[request.id] = route
        self._unbegun.add(request.id)
        return sequences

    def schedule(self, now: float = 0.0) -> RankPlans | None:
        """The next step of all ranks; None if none of them can run anything."""
        plans = [part.schedule(now) for part in self._parts]
        if all(plan is None for plan in plans):
            return None
        return RankPlans.of(tuple(plan or NOTHING for plan in plans))

    def complete(self, plan: StepPlan, ids: Iterable[int], arrived: Iterable[TransferEnd] = ()) -> list[Update]:
        """As `Scheduler.complete`; the ids of the ranks come one after another. No rank has pages elsewhere."""
        assert isinstance(plan, RankPlans)
        assert not [*arrived], "pages have come that no rank has asked for"
        left, updates = iter(ids), []
        for part, own in zip(self._parts, plan.parts, strict=True):
            updates += part.complete(own, list(islice(left, len(own.draws))))
        self._note(updates)
        return updates

    def fail(self, sequence: Sequence, error: str | None = None) -> list[Update]:
        updates = self._of(sequence.id).fail(sequence, error)
        self._note(updates)
        return updates

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        self._of(sequence.id).finish(sequence, reason, stop_reason)
        self._leave(sequence.request.id)

    def abort(self, request_id: str) -> list[Sequence]:
        rank = self.rank_of(request_id)
        ended = [] if rank is None else self._parts[rank].abort(request_id)
        self._leave(request_id)
        return ended

    def reset(self) -> None:
        for part in self._parts:
            part.reset()
        self._forget()

    def check(self) -> None:
        """Raise AssertionError unless the books of all ranks agree."""
        for part in self._parts:
            part.check()
        for id, route in self._routes.items():
            assert self._parts[route.replica].has(id), f"request {id} has ended, and its route has not"
        assert self._unbegun <= self._routes.keys(), "a request that has ended is waited for"

    def _of(self, sequence: int) -> Scheduler:
        return self._parts[sequence % len(self._parts)]

    def _note(self, updates: Listed[Update]) -> None:
        """Tell the router who has begun and who has ended."""
        if self._unbegun:
            for id in self._unbegun.intersection(update.sequence.request.id for update in updates):
                self._router.begun(self._routes[id])
                self._unbegun.discard(id)
        for update in updates:
            if update.finish_reason is not None:
                self._leave(update.sequence.request.id)

    def _leave(self, request_id: str) -> None:
        """Forget the way of a request if all its samples have ended."""
        route = self._routes.get(request_id)
        if route is not None and not self._parts[route.replica].has(request_id):
            self._router.ended(route)
            del self._routes[request_id]
            self._unbegun.discard(request_id)
