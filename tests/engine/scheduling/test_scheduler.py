"""What the scheduler promises, one promise a test; random loads are in test_scheduler_properties.py, what sequences
share and lose in test_scheduled_pages.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.engine.request import MAX_AHEAD, NO_SLOT, Request, Update, seconds_ahead
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling.config import SchedulerConfig
from tests.engine.scheduling.plans import finish, request, scheduler, shares, step


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
        assert [sequence.slot for sequence in sequences] == [0, 1, 2, NO_SLOT]
        of.abort("b")
        step(of)
        assert [sequence.slot for sequence in sequences] == [0, NO_SLOT, 2, 1]


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
        assert of.complete(first, [7]) == [Update(sequence, [7], None)]
        assert sequence.pending == 1

    def test_nothing_is_planned_beyond_the_length_that_is_known_ahead(self) -> None:
        of = scheduler()
        of.add(request("a", 5, max_tokens=2))
        plans = [of.schedule(), of.schedule()]
        assert of.schedule() is None
        reasons = [update.finish_reason for plan in plans if plan for update in of.complete(plan, [7])]
        assert reasons == [None, "length"]
        assert not of.has_work

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
