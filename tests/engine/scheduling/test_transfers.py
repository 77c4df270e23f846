"""Prefixes that come from elsewhere: who waits for them, who does not, and what becomes of them."""

from __future__ import annotations

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import NOTHING, StepPlan, TransferEnd
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.held import Held
from tests.engine.scheduling.plans import NamingScheduler, finish, request, shares, step
from tests.engine.scheduling.shelf import Shelf

PAGES = 40


def shelved(prompt: int, budget: int = 64, slots: int = 4) -> tuple[NamingScheduler, Shelf]:
    """A scheduler, and the full pages of a request "a" with so long a prompt elsewhere."""
    allocator, shelf = PageAllocator(PAGES, 4), Shelf(4, PAGES)
    shelf.put(request("a", prompt).prompt, "")
    of = NamingScheduler(SchedulerConfig(slots, budget, 100), allocator, PrefixTree(allocator), (), None, shelf)
    return of, shelf


def planned(of: NamingScheduler) -> StepPlan:
    plan = of.schedule()
    of.check()
    assert plan is not None
    return plan


def arrived(of: NamingScheduler, plan: StepPlan, whole: bool = True) -> list[TransferEnd]:
    return [TransferEnd(target, whole) for source, target in plan.copies if source >= PAGES]


def test_it_begins_behind_what_has_come() -> None:
    of, _ = shelved(13)
    (sequence,) = of.add(request("a", 13))
    plan = planned(of)
    assert [source for source, _ in plan.copies] == [PAGES, PAGES + 1, PAGES + 2]
    assert (plan.chunks, plan.tokens) == ((), 0), "nothing can run, so the step waits for them"
    assert of.take_held() == (Held("prefix"),)
    assert of.schedule() is None, "one that waits is enough"
    of.complete(plan, [], arrived(of, plan))
    assert shares(of, planned(of)) == [("a", 12, 1)]
    assert (sequence.cached_tokens, of.statistics.prefix_hits) == (12, 12)


def test_others_go_on_meanwhile_however_long_they_are() -> None:
    of, _ = shelved(13, budget=8)
    of.add(request("a", 13))
    of.add(request("b", 20, arrival=1.0))
    of.add(request("c", 3, arrival=2.0))
    loading = planned(of)
    assert shares(of, loading) == [("b", 0, 8)]
    of.complete(loading, [])
    assert shares(of, step(of)) == [("b", 8, 8)]
    assert shares(of, step(of)) == [("b", 16, 4), ("c", 0, 3)]
    plan = planned(of)
    of.complete(plan, [7, 7], arrived(of, loading))
    assert shares(of, planned(of)) == [("b", 21, 1), ("c", 4, 1), ("a", 12, 1)]


def test_a_request_that_comes_meanwhile_does_not_wait() -> None:
    of, _ = shelved(13)
    of.add(request("a", 13))
    waits = planned(of)
    of.add(request("b", 5, arrival=1.0))
    plan = planned(of)
    assert shares(of, plan) == [("b", 0, 5)]
    of.complete(waits, [])  # none has come in time
    of.complete(plan, [7])
    assert shares(of, planned(of)) == [("b", 5, 1)]


def test_one_transfer_serves_all_who_begin_with_it() -> None:
    of, _ = shelved(13)
    of.add(request("a", 13))
    of.add(request("also", 13, arrival=1.0))
    plan = planned(of)
    assert len(plan.copies) == 3
    of.complete(plan, [], arrived(of, plan)[:2])
    plan = planned(of)
    assert (plan.chunks, plan.copies) == ((), ()), "not all have come"
    of.complete(plan, [], [TransferEnd(2)])
    assert sorted(shares(of, planned(of))) == [("a", 12, 1), ("also", 12, 1)]


def test_what_is_lost_is_computed() -> None:
    of, shelf = shelved(13)
    (sequence,) = of.add(request("a", 13))
    plan = planned(of)
    first, *others = arrived(of, plan)
    of.complete(plan, [], [first._replace(whole=False), *others])
    assert len(shelf.pages) == 2
    assert shares(of, planned(of)) == [("a", 0, 13)]
    assert sequence.cached_tokens == 0


def test_nothing_comes_for_who_computes_all_or_has_other_tags_or_finds_no_room() -> None:
    of, _ = shelved(13)
    of.add(request("a", 13, prompt_logprobs=0))
    assert shares(of, step(of)) == [("a", 0, 13)]
    of, _ = shelved(80)
    of.add(request("b", 90, max_tokens=3))
    step(of)
    of.add(request("a", 80, arrival=1.0))
    plan = planned(of)
    assert not plan.copies, "its pages are taken only once there are enough for all of it"
    assert of.take_held() == (Held("pages"),)


def test_pages_that_only_the_tree_keeps_make_room() -> None:
    of, _ = shelved(13)
    for name in "bc":
        of.add(request(name, 76, max_tokens=1))
        list(finish(of))
    of.add(request("a", 13))
    plan = planned(of)
    assert len(plan.copies) == 3
    of.complete(plan, [], arrived(of, plan))
    assert shares(of, planned(of)) == [("a", 12, 1)]


def test_a_reset_forgets_what_is_under_way() -> None:
    of, _ = shelved(13)
    of.add(request("a", 13))
    planned(of)
    of.reset()
    of.check()
    of.complete(NOTHING, [])
    of.add(request("b", 13))
    assert shares(of, planned(of)) == [("b", 0, 13)]
