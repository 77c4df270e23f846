"""What the scheduler promises, one promise a test; random loads are in test_scheduler_properties.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import StepPlan
from strata.engine.request import MAX_AHEAD, Request, Sequence, Status, seconds_ahead
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


class TestAdmission:
    @pytest.mark.parametrize(
        ("prompt", "max_tokens", "message"),
        [
            ([], 5, "the prompt is empty"),
            (100, 5, "the prompt has 100 tokens, but max_model_len is 100"),
            (120, 5, "shorten the prompt to 99 tokens"),
            (30, 12, "30 prompt tokens and 12 output tokens need 11 KV pages, but the pool has 10"),
            (30, None, "30 prompt tokens and 70 output tokens need 25 KV pages"),
        ],
    )
    def test_what_can_never_fit_is_refused(self, prompt: list[int] | int, max_tokens: int | None, message: str) -> None:
        of = scheduler(pages=10)
        with pytest.raises(ValueError, match=message):
            of.add(request("a", prompt, max_tokens=max_tokens))
        assert not of.has_work

    def test_what_just_fits_runs_to_its_end(self) -> None:
        of = scheduler(pages=10)
        (sequence,) = of.add(request("a", 30, max_tokens=11))  # 40 tokens are read, the 41st is not
        assert len(list(finish(of))) == 11
        assert (len(sequence.outputs), sequence.finish_reason, sequence.preemptions) == (11, "length", 0)

    def test_an_id_in_use_is_refused_and_free_again_later(self) -> None:
        of = scheduler()
        of.add(request("a", 5))
        with pytest.raises(ValueError, match="'a' is in use"):
            of.add(request("a", 5))
        of.abort("a")
        of.add(request("a", 5))

    @pytest.mark.parametrize("field", ["max_sequences", "max_tokens", "max_length"])
    def test_a_config_without_room_is_refused(self, field: str) -> None:
        with pytest.raises(ValueError, match=f"{field} must be at least 1"):
            SchedulerConfig(**{"max_sequences": 1, "max_tokens": 1, "max_length": 1, field: 0})


class TestOrder:
    def test_requests_start_in_order_of_arrival(self) -> None:
        of = scheduler(slots=1, budget=100)
        for id, arrival in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
            of.add(request(id, 5, arrival=arrival, max_tokens=1))
        assert [shares(of, plan)[0][0] for plan in finish(of)] == ["a", "b", "c"]

    def test_a_lower_priority_number_starts_first(self) -> None:
        of = scheduler(slots=1)
        for arrival, (id, priority) in enumerate((("late", 1), ("first", -1), ("second", 0))):
            of.add(request(id, 5, arrival=float(arrival), priority=priority, max_tokens=1))
        assert [shares(of, plan)[0][0] for plan in finish(of)] == ["first", "second", "late"]

    def test_nobody_is_passed_by_whoever_comes_long_after(self) -> None:
        """However urgent those are: a stream of them does not keep one waiting for ever."""
        of = scheduler(slots=1)
        of.add(request("running", 1, max_tokens=1))
        (waiting,) = of.add(request("waiting", 5, arrival=1.0, priority=1000, max_tokens=1))
        for second in range(2, 300):
            of.add(request(f"urgent {second}", 5, arrival=float(second), priority=-1000, max_tokens=1))
            step(of)
            if waiting.finished:
                break
        assert second <= 2 * MAX_AHEAD + 2

    def test_no_priority_is_too_large(self) -> None:
        assert seconds_ahead(0) == 0
        assert [seconds_ahead(priority) for priority in (10**400, -(10**400))] == [-MAX_AHEAD, MAX_AHEAD]

    @given(st.lists(st.tuples(st.floats(0, 300), st.integers(-1000, 1000)), min_size=2, max_size=12))
    def test_priority_orders_those_that_came_together_and_bounds_the_wait_of_others(
        self, asked: list[tuple[float, int]]
    ) -> None:
        of = scheduler(slots=1)
        for number, (arrival, priority) in enumerate(asked):
            of.add(request(f"{number}", [number + 1], arrival=arrival, priority=priority, max_tokens=1))
        order = [int(shares(of, plan)[0][0]) for plan in finish(of)]
        for place, first in enumerate(order):
            for then in order[place + 1 :]:
                assert asked[first][0] <= asked[then][0] + 2 * MAX_AHEAD
                if asked[first][0] == asked[then][0]:
                    assert asked[first][1] <= asked[then][1]

    def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages(self) -> None:
        of = scheduler(pages=10, caching=False)
        of.add(request("running", 20, max_tokens=8))
        step(of)
        of.add(request("large", 28, arrival=1.0, max_tokens=4))
        of.add(request("small", 2, arrival=2.0, max_tokens=4))
        started = [share[0] for plan in finish(of) for share in shares(of, plan)]
        assert started.index("large") < started.index("small")

    def test_what_would_be_preempted_at_once_is_not_admitted(self) -> None:
        of = scheduler(pages=10, page_size=4, caching=False)
        (running,) = of.add(request("a", 20, max_tokens=8))
        (waiting,) = of.add(request("b", 20, arrival=1.0, max_tokens=8))
        list(finish(of))  # five pages each would fit, but not the sixth that each needs
        assert (running.preemptions, waiting.preemptions) == (0, 0)

    def test_the_lowest_free_slot_is_taken(self) -> None:
        of = scheduler(slots=3)
        sequences = [of.add(request(id, 5, arrival=float(i), max_tokens=50))[0] for i, id in enumerate("abcd")]
        step(of)
        assert [sequence.slot for sequence in sequences] == [0, 1, 2, None]
        of.abort("b")
        step(of)
        assert [sequence.slot for sequence in sequences] == [0, None, 2, 1]


class TestBudget:
    def test_prompts_are_cut_into_chunks_that_run_beside_decodes(self) -> None:
        of = scheduler(budget=8)
        of.add(request("a", 5, max_tokens=9))
        of.add(request("b", 20, arrival=1.0, max_tokens=9))
        plan = step(of)
        assert shares(of, plan) == [("a", 0, 5), ("b", 0, 3)]
        assert plan is not None
        assert [len(chunk.draws) for chunk in plan.chunks] == [1, 0]
        assert shares(of, step(of)) == [("a", 5, 1), ("b", 3, 7)]
        assert shares(of, step(of)) == [("a", 6, 1), ("b", 10, 7)]
        assert shares(of, step(of)) == [("a", 7, 1), ("b", 17, 3)]
        assert shares(of, step(of)) == [("a", 8, 1), ("b", 20, 1)]

    def test_a_long_prompt_does_not_hold_up_decodes_of_later_requests(self) -> None:
        of = scheduler(budget=8, slots=4)
        of.add(request("a", 3, arrival=1.0, max_tokens=30))
        step(of)
        of.add(request("b", 60, priority=-1, max_tokens=30))
        for _ in range(4):
            assert shares(of, step(of))[0][0] == "a"

    def test_no_more_run_than_a_step_has_tokens(self) -> None:
        of = scheduler(budget=3, slots=8)
        for place, id in enumerate("abcde"):
            of.add(request(id, 2, arrival=float(place), max_tokens=10))
        for plan in finish(of):
            assert plan.tokens <= 3
            assert of.running <= 3

    def test_pages_are_told_once(self) -> None:
        of = scheduler(page_size=4)
        (sequence,) = of.add(request("a", 6, max_tokens=7))
        told = [(chunk.first_page, len(chunk.new_pages)) for plan in finish(of) for chunk in plan.chunks]
        assert told == [(0, 2), (2, 0), (2, 0), (2, 1), (3, 0), (3, 0), (3, 0)]
        assert sequence.finished


class TestRunAhead:
    def test_a_step_is_planned_on_an_id_the_host_does_not_know(self) -> None:
        of = scheduler()
        (sequence,) = of.add(request("a", 5, max_tokens=3))
        first = of.schedule()
        second = of.schedule()
        assert (shares(of, first), shares(of, second)) == ([("a", 0, 5)], [("a", 5, 1)])
        assert (len(sequence.tokens), sequence.pending) == (5, 2)
        assert first is not None
        assert of.complete(first, [7]) == [(sequence, 7, None)]
        assert sequence.pending == 1

    def test_nothing_is_planned_beyond_the_length_that_is_known_ahead(self) -> None:
        of = scheduler()
        of.add(request("a", 5, max_tokens=2))
        plans = [of.schedule(), of.schedule()]
        assert of.schedule() is None
        reasons = [update.finish_reason for plan in plans if plan for update in of.complete(plan, [7])]
        assert reasons == [None, "length"]
        assert not of.has_work

    def test_what_was_planned_beyond_an_end_is_dropped(self) -> None:
        of = scheduler()
        (sequence,) = of.add(request("a", 5, max_tokens=9))
        first, second = of.schedule(), of.schedule()
        assert first is not None
        assert second is not None
        assert of.complete(first, [0]) == [(sequence, 0, "stop")]
        of.check()
        assert of.complete(second, [7]) == []
        assert sequence.outputs == [0]

    def test_a_preempted_sequence_keeps_the_id_that_is_under_way(self) -> None:
        of = scheduler(pages=7, page_size=2, caching=False)
        (old,) = of.add(request("a", 6, max_tokens=9))
        (young,) = of.add(request("b", 5, arrival=1.0, max_tokens=9))
        first = of.schedule()
        assert first is not None
        assert len(first.draws) == 2
        second = of.schedule()  # "a" gets the last page, "b" has room
        assert second is not None
        of.complete(first, [7, 8])
        third = of.schedule()  # "b" needs a page and there is none
        assert third is not None
        assert shares(of, third) == [("a", 7, 1)]
        assert (young.status, young.pending, young.preemptions) == (Status.WAITING, 1, 1)
        of.complete(second, [7, 9])
        assert young.outputs == [8, 9]
        of.complete(third, [7])
        list(finish(of))
        assert len(young.outputs) == len(old.outputs) == 9
        of.check()

    def test_a_sequence_is_not_admitted_again_while_an_id_is_under_way(self) -> None:
        # "b" loses a copy of a page that "a" holds in the tree, so there is room for it again as soon as it is out.
        of = scheduler(pages=6, page_size=4)
        of.add(request("a", [*range(100, 108), 7], max_tokens=8))
        (young,) = of.add(request("b", range(100, 104), arrival=1.0, max_tokens=8))
        plan = of.schedule()
        for _ in range(4):
            before, plan = plan, of.schedule()
            assert before is not None
            of.complete(before, [7, 7])
        assert (young.status, young.preemptions) == (Status.RUNNING, 0)
        after = of.schedule()
        assert shares(of, after) == [("a", 13, 1)]
        assert (young.status, young.pending, young.preemptions) == (Status.WAITING, 1, 1)
        assert plan is not None
        assert after is not None
        of.complete(plan, [7, 7])
        of.complete(after, [7])
        list(finish(of))
        assert len(young.outputs) == 8

    def test_only_bad_words_of_several_ids_need_known_ids(self) -> None:
        of = scheduler()
        single = Request("a", (5, 6), SamplingParams(), bad_words=((3,),))
        double = Request("b", (5, 6), SamplingParams(), bad_words=((3,), (4, 5)))
        of.add(single)
        step(of)
        assert not of.needs_known_ids
        of.add(double)
        step(of)
        assert of.needs_known_ids

    def test_ids_that_would_complete_a_bad_word_are_banned_from_this_draw_alone(self) -> None:
        of = scheduler()
        words = ((3,), (4, 5), (5, 6, 8), (9, 9, 9, 9))
        (first, second) = of.add(Request("a", (1, 4), SamplingParams(n=2), bad_words=words))
        plan = step(of, 5)
        assert plan is not None
        assert [new.sampling.banned_ids for new in plan.new] == [(3,), (3,)]
        assert sorted(plan.banned) == [(first.slot, 5), (second.slot, 5)]
        for token, banned in ((6, []), (7, [(first.slot, 8), (second.slot, 8)]), (7, [])):
            plan = step(of, token)
            assert plan is not None
            assert sorted(plan.banned) == banned

    def test_a_runner_is_told_of_a_sequence_when_it_takes_a_slot_and_when_the_slot_is_free(self) -> None:
        of = scheduler(slots=1, pages=4, page_size=4)
        of.add(request("a", 3, max_tokens=2))
        of.add(request("b", 2, max_tokens=1))
        told = [([(of.names[new.id], new.slot, new.tokens) for new in plan.new], plan.ended) for plan in finish(of)]
        a, b = (("a", 0, (97000, 97001, 97002)), ("b", 0, (98000, 98001)))
        assert told == [([a], ()), ([], ()), ([b], (0,))]


class TestEnds:
    @pytest.mark.parametrize(
        ("params", "ids", "expected"),
        [
            ({}, [7, 0], (2, "stop", None)),
            ({"ignore_eos": True}, [7, 0, 7, 7], (4, "length", None)),
            ({"stop_token_ids": [5]}, [7, 5], (2, "stop", 5)),
            ({"min_tokens": 3}, [0, 0, 0], (3, "stop", None)),
            ({"min_tokens": 2, "stop_token_ids": [5], "ignore_eos": True}, [5, 0, 5], (3, "stop", 5)),
            ({}, [7, 7, 7, 0], (4, "stop", None)),
            ({}, [7, 7, 7, 7], (4, "length", None)),
        ],
    )
    def test_reasons(
        self, params: dict[str, object], ids: list[int], expected: tuple[int, str, int | str | None]
    ) -> None:
        of = scheduler()
        (sequence,) = of.add(request("a", 5, max_tokens=4, **params))
        for id in ids:
            assert not sequence.finished
            step(of, id)
        assert (len(sequence.outputs), sequence.finish_reason, sequence.stop_reason) == expected
        of.check()

    def test_max_model_len_ends_a_sequence(self) -> None:
        of = scheduler(longest=8)
        (sequence,) = of.add(request("a", 5, max_tokens=None))
        list(finish(of))
        assert (len(sequence.outputs), sequence.finish_reason) == (3, "length")

    def test_a_stop_string_overrides_the_length(self) -> None:
        of = scheduler()
        (sequence,) = of.add(request("a", 5, max_tokens=1))
        step(of)
        of.finish(sequence, "stop", "END")
        assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "END")

    def test_ids_must_match_the_draws(self) -> None:
        of = scheduler()
        of.add(request("a", 5))
        plan = of.schedule()
        assert plan is not None
        with pytest.raises(ValueError, match="zip"):
            of.complete(plan, [])

    @pytest.mark.parametrize("steps", range(5))
    @pytest.mark.parametrize("planned", [0, 1])
    def test_abort_at_any_moment_leaves_nothing(self, steps: int, planned: int) -> None:
        of = scheduler(budget=4, slots=2)
        aborted = of.add(request("a", 9, max_tokens=5, n=3))
        (other,) = of.add(request("b", 9, arrival=1.0, max_tokens=5))
        for _ in range(steps):
            step(of)
        plans = [of.schedule() for _ in range(planned)]
        assert of.abort("a") == aborted
        assert of.abort("a") == of.abort("unknown") == []
        of.check()
        for plan in plans:
            if plan is not None:
                updates = of.complete(plan, [7] * len(plan.draws))
                assert all(update.sequence is other for update in updates)
        list(finish(of))
        assert len(other.outputs) == 5
        of.check()


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

    def test_samples_outlive_the_first_one(self) -> None:
        of = scheduler(budget=4)
        sequences = of.add(request("a", 9, n=2, max_tokens=4))
        step(of)
        of.finish(sequences[0], "error")
        list(finish(of))
        assert len(sequences[1].outputs) == 4
        of.check()


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

    def test_cached_pages_give_way_to_running_sequences(self) -> None:
        of = scheduler(pages=10, page_size=4)
        for id in "abcde":
            (sequence,) = of.add(request(id, 20, max_tokens=20))
            list(finish(of))
            assert sequence.preemptions == 0
            of.check()


class TestFailure:
    """A negative id is a draw from logits that are no distribution."""

    def test_it_ends_the_request_and_no_other(self) -> None:
        of = scheduler(page_size=4)
        broken = of.add(request("a", 9, n=2, max_tokens=4))
        (healthy,) = of.add(request("b", 9, arrival=1.0, max_tokens=4))
        plan = of.schedule()
        assert plan is not None
        updates = of.complete(plan, [7, -1, 7])
        assert [(update.sequence, update.token, update.finish_reason) for update in updates] == [
            (broken[0], 7, None),
            (healthy, 7, None),
            (broken[1], None, "error"),
            (broken[0], None, "error"),
        ]
        of.check()
        list(finish(of))
        assert (healthy.finish_reason, len(healthy.outputs)) == ("length", 4)

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

    def test_who_shares_the_prompt_in_the_next_step_goes_on(self) -> None:
        of = scheduler(page_size=4)
        of.add(request("a", range(100, 113), max_tokens=4))
        (sharer,) = of.add(request("b", [*range(100, 112), 5, 5], arrival=1.0, max_tokens=4))
        first, second = of.schedule(), of.schedule()
        assert first is not None
        assert second is not None
        assert sharer.cached_tokens == 12
        of.complete(first, [-1])
        of.complete(second, [7, 7])
        of.check()
        list(finish(of))
        assert len(sharer.outputs) == 4
        (later,) = of.add(request("c", range(100, 113), max_tokens=1))
        step(of)
        assert later.cached_tokens == 12, "a draw that gave an id has read these pages"

    def test_a_sequence_that_was_preempted_meanwhile_fails_too(self) -> None:
        of = scheduler(pages=9, page_size=4)
        (old,) = of.add(request("a", 14, max_tokens=8))
        (young,) = of.add(request("b", 14, arrival=1.0, max_tokens=6))
        outstanding = of.schedule()
        while not young.preemptions:
            plan, outstanding = outstanding, of.schedule()
            assert plan is not None
            assert outstanding is not None
            ids = [-1 if draw.sequence == young.id and young.preemptions else 7 for draw in plan.draws]
            of.complete(plan, ids)
        assert young.finish_reason == "error"
        of.check()
        of.complete(outstanding, [7] * len(outstanding.draws))
        list(finish(of))
        assert (old.finish_reason, len(old.outputs)) == ("length", 8)
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


def test_tokens_that_wait_are_those_of_the_queue_and_of_chunks_to_come() -> None:
    of = scheduler(slots=2, budget=16, caching=False)
    assert of.waiting_tokens == 0
    for name, count in (("a", 20), ("b", 10), ("c", 7)):
        of.add(request(name, count, max_tokens=3))
    assert of.waiting_tokens == 37
    for left in (37 - 16, 37 - 30, 7, 7):  # b has one token in the second step less for a's decode
        step(of)
        assert of.waiting_tokens == left
    while of.has_work:
        step(of)
    assert of.waiting_tokens == 0
