"""What the scheduler promises of pages: samples and prefixes that share them, what failures and preemption take, and
pages that come from elsewhere."""

from __future__ import annotations

import pytest

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import NOTHING, StepPlan, TransferEnd
from strata.engine.request import Request, Sequence
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig, Waiting
from strata.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.plans import NamingScheduler, finish, request, scheduler, shares, step
from tests.engine.scheduling.shelf import Shelf


class TestSamples:
    def prompt_end(self, of: Scheduler, sequences: list[Sequence]) -> StepPlan:
        plan = step(of)
        assert plan is not None
        assert [draw.sequence for draw in plan.draws] == [sequence.id for sequence in sequences]
        return plan

    def test_samples_share_the_prompt_and_copy_a_page_only_to_write_in_it(self) -> None:
        of = scheduler(page_size=4)
        sequences = of.add(request("a", 6, n=3, max_tokens=4))
        plan = self.prompt_end(of, sequences)
        assert (plan.tokens, len(plan.chunks), plan.copies) == (6, 1, ())
        assert sequences[0].pages == sequences[1].pages == sequences[2].pages
        full, partial = sequences[0].pages
        plan = step(of)
        assert plan is not None
        assert [source for source, _ in plan.copies] == [partial, partial]
        assert [sequence.pages[0] for sequence in sequences] == [full] * 3
        assert sequences[2].pages[1] == partial  # the last holder writes in place
        assert {target for _, target in plan.copies} == {sequences[0].pages[1], sequences[1].pages[1]}
        assert [(chunk.first_page, len(chunk.new_pages)) for chunk in plan.chunks] == [(1, 1), (0, 2), (0, 2)]
        plan = step(of)
        assert plan is not None
        assert plan.copies == ()

    def test_a_prompt_of_full_pages_is_never_copied(self) -> None:
        of = scheduler(page_size=4)
        sequences = of.add(request("a", 8, n=3, max_tokens=4))
        self.prompt_end(of, sequences)
        assert all(plan.copies == () for plan in finish(of))

    def test_a_page_whose_other_holder_was_preempted_for_it_is_not_copied(self) -> None:
        of = scheduler(pages=5, page_size=4, caching=False)
        first, second = of.add(request("a", 18, n=2, max_tokens=3))
        self.prompt_end(of, [first, second])
        plan = step(of)
        assert plan is not None
        assert (shares(of, plan), plan.copies) == ([("a", 18, 1)], ())
        assert (first.preemptions, second.preemptions) == (0, 1)
        list(finish(of))
        assert len(first.outputs) == len(second.outputs) == 3

    def test_samples_without_a_slot_wait_and_find_the_prompt_cached(self) -> None:
        of = scheduler(page_size=4, slots=2)
        sequences = of.add(request("a", 9, n=3, max_tokens=4))
        self.prompt_end(of, sequences[:2])
        assert of.waiting == 1
        list(finish(of))
        assert [len(sequence.outputs) for sequence in sequences] == [4, 4, 4]
        assert sequences[2].cached_tokens == 8


class TestPrefix:
    def test_a_prompt_is_found_as_soon_as_its_step_is_under_way(self) -> None:
        of = scheduler(page_size=4, budget=64)
        (first,) = of.add(request("a", range(100, 121), max_tokens=4))
        (second,) = of.add(request("b", [*range(100, 117), 5, 5], arrival=1.0, max_tokens=4))
        assert shares(of, of.schedule()) == [("a", 0, 21)]
        assert shares(of, of.schedule()) == [("a", 21, 1), ("b", 16, 3)]
        assert second.pages[:4] == first.pages[:4]
        assert (first.cached_tokens, second.cached_tokens) == (0, 16)
        assert (of.statistics.prefix_queries, of.statistics.prefix_hits) == (40, 16)

    def test_a_prompt_that_differs_in_its_last_token_is_no_decode_beside_the_one_it_would_read(self) -> None:
        of = scheduler(page_size=4, budget=64)
        of.add(request("a", [*range(100, 116), 1], max_tokens=4))
        of.add(request("b", [*range(100, 116), 2], arrival=1.0, max_tokens=4))
        assert shares(of, of.schedule()) == [("a", 0, 17)]
        assert shares(of, of.schedule()) == [("a", 17, 1), ("b", 16, 1)]

    def test_who_would_find_less_than_a_page_does_not_wait(self) -> None:
        of = scheduler(page_size=4, budget=64)
        of.add(request("a", range(100, 110), max_tokens=4))
        of.add(request("b", [*range(100, 103), 5, 5], arrival=1.0, max_tokens=4))
        of.add(request("c", range(100, 104), arrival=2.0, max_tokens=4))  # a token must be left to compute
        assert shares(of, of.schedule()) == [("a", 0, 10), ("b", 0, 5), ("c", 0, 4)]

    def test_others_go_before_those_that_wait_for_a_step_and_every_prompt_is_computed_once(self) -> None:
        of = scheduler(page_size=4, budget=64)
        for place, id in enumerate(("a1", "a2", "b1", "a3", "b2")):
            of.add(request(id, [*range(1000 * ord(id[0]), 1000 * ord(id[0]) + 8), place], arrival=float(place)))
        assert shares(of, of.schedule()) == [("a1", 0, 9), ("b1", 0, 9)]
        assert shares(of, of.schedule()) == [("a1", 9, 1), ("b1", 9, 1), ("a2", 8, 1), ("a3", 8, 1), ("b2", 8, 1)]

    @pytest.mark.parametrize(
        ("options", "later"),
        [
            ({"budget": 20}, {"prompt": 12}),  # its prompt does not fit into the step
            ({"slots": 2}, {"prompt": 5}),  # it would take the slot
            ({"slots": 3}, {"prompt": 5, "n": 2}),
            ({"pages": 8}, {"prompt": 9}),  # it would take the pages
        ],
    )
    def test_nobody_takes_what_those_that_wait_for_a_step_need(
        self, options: dict[str, int], later: dict[str, int]
    ) -> None:
        of = scheduler(**{"page_size": 4, "budget": 64, **options})
        of.add(request("a", [*range(100, 108), 1], max_tokens=4))
        (second,) = of.add(request("b", [*range(100, 108), 2], arrival=1.0, max_tokens=4))
        of.add(request("c", **later, arrival=2.0, max_tokens=4))
        assert shares(of, of.schedule()) == [("a", 0, 9)]
        assert ("b", 8, 1) in shares(of, of.schedule())
        assert second.cached_tokens == 8

    def test_a_step_that_came_to_nothing_leaves_nothing_to_find(self) -> None:
        of = scheduler(page_size=4, budget=8)
        added = of.add(request("a", range(100, 121), max_tokens=4, n=2))
        step(of)
        of.schedule()
        of.reset()
        of.check()
        assert not of.has_work
        assert all(sequence.finish_reason == "abort" and not sequence.pages for sequence in added)
        (again,) = of.add(request("a", range(100, 121), max_tokens=1))
        of.schedule()
        assert again.cached_tokens == 0

    def test_outputs_are_found_by_the_next_turn(self) -> None:
        of = scheduler(page_size=4)
        (first,) = of.add(request("a", 6, max_tokens=8))
        list(finish(of))
        (second,) = of.add(request("b", [*first.tokens, 5, 5], max_tokens=1))
        step(of)
        assert second.cached_tokens == 12  # 14 tokens, of which the last was never read

    def test_other_salts_and_scored_prompts_and_no_cache_find_nothing(self) -> None:
        for caching, salt, scored in ((True, "x", None), (True, "", 0), (False, "", None)):
            of = scheduler(page_size=4, caching=caching)
            of.add(request("a", range(100, 120), max_tokens=1))
            list(finish(of))
            params = SamplingParams(max_tokens=1, prompt_logprobs=scored)
            (second,) = of.add(Request("b", tuple(range(100, 120)), params, salt=salt))
            assert step(of).tokens == 20  # type: ignore[union-attr]
            assert second.cached_tokens == 0


class TestFailure:
    """A negative id is a draw from logits that are no distribution."""

    def test_what_only_it_has_read_is_not_found_again_but_what_was_verified_is(self) -> None:
        of = scheduler(page_size=4)
        of.add(request("a", range(100, 113), max_tokens=1))
        list(finish(of))
        for again in ("b", "c"):
            (broken,) = of.add(request(again, range(100, 125), max_tokens=4))
            plan = of.schedule()
            assert plan is not None
            assert broken.cached_tokens == 12
            of.complete(plan, [-1])
            of.check()
            of.add(
                request("d" + again, range(100, 113), max_tokens=1)
            )  # its draw gives an id, so its pages are verified
            list(finish(of))

    def test_pages_that_fail_twice_in_a_row_are_computed_anew(self) -> None:
        of = scheduler(page_size=4)
        of.add(request("a", range(100, 113), max_tokens=1))
        list(finish(of))
        cached = []
        for id in "bcd":
            (sequence,) = of.add(request(id, range(100, 113), max_tokens=1))
            plan = of.schedule()
            assert plan is not None
            cached.append(sequence.cached_tokens)
            of.complete(plan, [-1])
        assert cached == [12, 12, 0]
        of.check()


class TestPreemption:
    def test_the_latest_of_the_lowest_priority_gives_way_and_comes_back(self) -> None:
        of = scheduler(pages=12, page_size=2, caching=False)
        (urgent,) = of.add(request("a", 4, arrival=2.0, priority=-1, max_tokens=12))
        (old,) = of.add(request("b", 4, arrival=0.0, max_tokens=12))
        (young,) = of.add(request("c", 4, arrival=1.0, max_tokens=12))
        plans = list(finish(of))
        assert urgent.preemptions == 0
        assert young.preemptions >= 1
        assert of.statistics.preemptions == old.preemptions + young.preemptions
        last = {share[0]: place for place, plan in enumerate(plans) for share in shares(of, plan)}
        assert last["a"] < last["b"] < last["c"]
        assert [len(sequence.outputs) for sequence in (urgent, old, young)] == [12, 12, 12]
        of.check()

    def test_what_was_computed_is_found_again_if_nobody_needed_the_pages(self) -> None:
        of = scheduler(pages=9, page_size=4)
        (old,) = of.add(request("a", 14, max_tokens=8))
        (young,) = of.add(request("b", 14, arrival=1.0, max_tokens=6))
        computed = [
            (chunk.start, chunk.count) for plan in finish(of) for chunk in plan.chunks if chunk.sequence == young.id
        ]
        assert (old.preemptions, young.preemptions) == (0, 1)
        # It lost four full pages, of which the other sequence needed one: the deepest.
        assert computed == [(0, 14), (14, 1), (15, 1), (12, 5), (17, 1), (18, 1)]

    def test_the_oldest_gets_on_at_every_step_however_few_the_pages(self) -> None:
        of = scheduler(pages=8, page_size=1, slots=6, longest=9)
        for place in range(12):
            of.add(request(f"{place}", [place + 1], arrival=float(place), max_tokens=8))
        done = []
        for plan in finish(of):
            first = next(id for id in map(str, range(12)) if id not in done)
            assert first in [share[0] for share in shares(of, plan)]
            done += [of.names[chunk.sequence] for chunk in plan.chunks if of.sequence(chunk.sequence) is None]
        assert done == [str(place) for place in range(12)]


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
    assert of.take_waiting() == (Waiting("prefix"),)
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
    assert of.take_waiting() == (Waiting("pages"),)


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
