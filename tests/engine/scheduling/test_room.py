"""How prompts are divided beside decodes, on a device whose times can be counted by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.cost.step_times import DivisionTimes, StepTimes
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.room import LEAST_TOKENS, InLine, PromptRoom, StepTarget
from strata.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.plans import request, step

MS = 1e-3
NOTHING = 1e-18
# A step takes 4 ms, and 10 us more for each token; so 1600 fit into 20 ms.
TIMES = StepTimes(4 * MS, NOTHING, NOTHING, 0.01 * MS, NOTHING, NOTHING, NOTHING)
TARGET_SECONDS = 20 * MS


def room(decodes: int, in_line: Iterable[InLine] = (), times: StepTimes = TIMES) -> PromptRoom:
    return PromptRoom(StepTarget(TARGET_SECONDS, times, wait=1.0), decodes, keys=0, in_line=in_line)


def test_what_fits_is_taken_whole_and_what_does_not_ends_with_a_page() -> None:
    of = room(decodes=50)
    assert of.chunk(0, 1000, most=8192, page_size=16) == 1000
    of.take(0, 1000)
    assert of.chunk(0, 549, most=8192, page_size=16) == 549
    assert of.chunk(0, 555, most=8192, page_size=16) == 544  # of 549 to 550
    assert of.chunk(7, 555, most=8192, page_size=16) == 537
    assert of.chunk(0, 555, most=100, page_size=16) == 96


def test_a_divided_prompt_ends_where_the_step_needs_no_padding() -> None:
    of = PromptRoom(StepTarget(20 * MS, TIMES, (512, 1024, 1200, 1600)), 50, 0, ())
    assert of.chunk(0, 5000, most=8192, page_size=16) == 1136  # of 1549; and 14 tokens less than a page of padding
    assert of.chunk(9, 5000, most=8192, page_size=16) == 1143
    assert of.chunk(0, 1540, most=8192, page_size=16) == 1540  # it ends here
    assert of.chunk(0, 5000, most=300, page_size=16) == 288  # no size is so small
    of.take(0, 1000)
    assert of.chunk(0, 5000, most=8192, page_size=16) == 144
    of.take(0, 144)
    assert of.chunk(0, 5000, most=8192, page_size=16) == 400  # all that is left: none fits up to a size


def test_a_prompt_gets_more_where_ranks_divide_the_step() -> None:
    """On two ranks 5 ms and 5 us a token from 1,024 tokens on, so that 3,000 fit into 20 ms."""
    two = replace(TIMES, recorded=8192, division=DivisionTimes(2, 1024, 1 * MS, 0.0, recorded=8192))
    of = room(decodes=50, times=two)
    assert of.chunk(0, 2940, most=8192, page_size=16) == 2940
    assert of.chunk(0, 5000, most=8192, page_size=16) == 2944  # of 2949 to 2950
    of = PromptRoom(StepTarget(20 * MS, two, (512, 1024, 2048, 2560, 3072)), 50, 0, ())
    assert of.chunk(0, 5000, most=8192, page_size=16) == 2496  # which are 14 less than 2,560 tokens of the step
    of.take(0, 2496)
    assert of.chunk(0, 5000, most=8192, page_size=16) == 448  # of 454, all that is left
    # In 10 ms 1,004 tokens of a divided step would fit, which is too short for one.
    short = PromptRoom(StepTarget(10 * MS, two), 1, 0, ())
    assert short.chunk(0, 5000, most=8192, page_size=16) == 592  # of 601


def test_ranks_divide_no_step_of_decodes_alone() -> None:
    """2,600 of them take 30 ms on two ranks as on one, and with a prompt 2.5 times that, 75 ms."""
    two = replace(TIMES, recorded=8192, division=DivisionTimes(2, 1024, 1 * MS, 0.0, recorded=8192))
    assert room(decodes=2600).chunk(0, 9000, most=8192, page_size=16) == 4496  # of 7,100 tokens in all
    # Of 14,000 in all: divided a step takes 5 ms, and 5 us more for each token.
    assert room(decodes=2600, times=two).chunk(0, 12_000, most=12_000, page_size=16) == 11_392


def test_what_a_prompt_has_to_get_is_padded() -> None:
    slow = StepTimes(1.0, NOTHING, NOTHING, 1.0, NOTHING, 1.0, 1.0)
    of = PromptRoom(StepTarget(20 * MS, slow, (128, 256, 512)), 50, 0, ())
    assert of.chunk(0, 5000, most=8192, page_size=16) == LEAST_TOKENS


def test_who_comes_after_a_full_step_gets_nothing() -> None:
    of = room(decodes=50)
    of.take(0, 1545)
    assert of.chunk(0, 100, most=8192, page_size=16) == 0


def test_the_first_prompt_gets_on_however_long_decodes_take() -> None:
    slow = StepTimes(1.0, NOTHING, NOTHING, 1.0, NOTHING, 1.0, 1.0)
    of = room(decodes=50, times=slow)
    assert of.chunk(100_000, 5000, most=8192, page_size=16) == LEAST_TOKENS
    assert of.chunk(100_000, 5000, most=5, page_size=16) == 5
    of.take(0, LEAST_TOKENS - 20)
    assert of.chunk(0, 5000, most=8192, page_size=16) == 16
    of.take(0, 20)
    assert of.chunk(0, 5000, most=8192, page_size=16) == 0


def test_decodes_that_take_long_themselves_have_two_fifths_of_the_steps() -> None:
    slow = StepTimes(30 * MS, NOTHING, NOTHING, 0.01 * MS, NOTHING, NOTHING, NOTHING)
    assert room(decodes=200, times=slow).chunk(0, 10_000, most=10_000, page_size=1) == pytest.approx(4800, abs=1)


@pytest.mark.parametrize(
    ("in_line", "tokens"),
    [
        ((), 1550),
        ([InLine(0, 70_000, 0.0)], 1550),  # in steps of 15 ms it is read within a second
        # In 4.5 ms of each step nothing of a prompt is read, and 0.9 of a second are needed for it: steps of 45 ms.
        ([InLine(0, 90_000, 0.0)], 4050),
        ([InLine(5000, 90_000, 0.0)], 4050),
        ([InLine(0, 30_000, 0.0), InLine(0, 60_000, 0.0)], 4050),
        ([InLine(0, 45_000, 0.5)], 4050),
        ([InLine(0, 1000, 0.99), InLine(0, 10, 0.0)], 100_000),  # too late, like the next
        ([InLine(0, 10, 0.0), InLine(0, 99_990, 0.0), InLine(0, 10, 0.0)], 100_000),
        ([InLine(0, 10, 7.0)], 100_000),
    ],
)
def test_a_step_is_as_long_as_prompts_in_line_need_it_to_be(in_line: list[InLine], tokens: int) -> None:
    assert room(50, in_line).chunk(0, 100_000, most=100_000, page_size=1) == pytest.approx(tokens, abs=2)


def test_a_step_behind_many_keys_is_no_shorter_than_it_is_padded_to() -> None:
    slow = StepTimes(1.0, NOTHING, NOTHING, 1.0, NOTHING, 1.0, 1.0)
    of = PromptRoom(StepTarget(20 * MS, slow, (256, 448, 512), padded=(6000, 448)), 50, 0, ())
    assert of.chunk(5984, 5000, most=8192, page_size=16) == LEAST_TOKENS
    assert of.chunk(6000, 5000, most=8192, page_size=16) == 384  # of 398: whole pages
    of.take(6000, 384)
    assert of.chunk(0, 5000, most=8192, page_size=16) == 0


def scheduler(times: StepTimes | None, **options: Any) -> Scheduler:
    target = None if times is None else StepTarget(TARGET_SECONDS, times)
    pages = PageAllocator(4000, 16)
    return Scheduler(SchedulerConfig(64, 8192, 30_000, target=target, **options), pages, PrefixTree(pages))


def counts(of: Scheduler) -> list[int]:
    plan = step(of)
    assert plan is not None
    return [chunk.count for chunk in plan.chunks]


def test_without_decodes_a_step_is_filled_and_beside_them_it_is_kept_short() -> None:
    of = scheduler(TIMES)
    of.add(request("a", 10_000, max_tokens=100))
    assert counts(of) == [8192]
    assert counts(of) == [10_000 - 8192]
    of.add(request("b", 3000, arrival=1.0, max_tokens=100))
    of.add(request("c", 50, arrival=2.0, max_tokens=100))
    assert counts(of) == [1, 1584]  # 99 pages; the next prompt waits behind the one that was divided
    assert counts(of) == [1, 1416, 50]
    assert counts(of) == [1, 1, 1]


def test_without_a_target_prompts_are_divided_by_tokens_alone() -> None:
    of = scheduler(None)
    of.add(request("a", 10, max_tokens=100))
    step(of)
    of.add(request("b", 10_000, arrival=1.0, max_tokens=100))
    assert counts(of) == [1, 8191]


def test_a_step_is_kept_short_for_a_prompt_that_only_cached_pages_make_room_for() -> None:
    pages = PageAllocator(150, 16)
    target = StepTarget(1 * MS, TIMES)
    of = Scheduler(SchedulerConfig(64, 8192, 30_000, target=target), pages, PrefixTree(pages))
    common = list(range(1600))
    of.add(request("a", common, max_tokens=100))
    assert counts(of) == [1600]
    of.add(request("b", [*common, *range(50_000, 50_640)], arrival=1.0, max_tokens=9))
    assert counts(of) == [1, 592]  # 2.5 times as long as the decode alone: 4 ms, and 10 us a token
    assert counts(of) == [1, 48]


@pytest.mark.parametrize("times", [TIMES, None])
def test_a_higher_priority_goes_before_the_rest_of_a_prompt(times: StepTimes | None) -> None:
    of = scheduler(times)
    of.add(request("a", 10, max_tokens=100))
    step(of)
    of.add(request("b", 20_000, arrival=1.0, max_tokens=9))
    (_, first) = counts(of)
    of.add(request("c", 50, priority=-1, arrival=2.0, max_tokens=9))
    of.add(request("d", 50, arrival=3.0, max_tokens=9))
    *others, rest = counts(of)
    assert others == [1, 50]
    assert first - 80 < rest < first - 30  # what is left; the last one waits behind it
    assert counts(of)[:2] == [1, 1]
    of.check()


def test_a_prompt_goes_before_one_that_waits_for_a_step_only_if_it_fits_in_time() -> None:
    for length, admitted in ((500, True), (1500, False)):
        of = scheduler(TIMES)
        of.add(request("a", 10, max_tokens=100))
        step(of)
        common = list(range(50_000, 50_160))
        of.add(request("b", [*common, 1], arrival=1.0, max_tokens=9))
        of.add(request("c", [*common, 2], arrival=2.0, max_tokens=9))
        of.add(request("d", length, arrival=3.0, max_tokens=9))
        assert counts(of) == ([1, 161, length] if admitted else [1, 161])
        assert counts(of)[:3] == [1, 1, 1]  # the third finds the prefix of the second
        of.check()
