"""How prompts are divided beside decodes, on a device whose times can be counted by hand. What steps are predicted
to take: by hand, against what was measured, and the chunk that follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strata.cache.pages import PageAllocator
from strata.cache.pool import PoolShape
from strata.cache.prefix import PrefixTree
from strata.cost.step_times import ShardingTimes, StepTimes
from strata.engine.program.meta_model import MetaModel
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.prompt_budget import MIN_TOKENS, InLine, PromptBudget, StepTarget
from strata.engine.scheduling.scheduler import Scheduler
from strata.engine.step_cost import step_times
from strata.hardware.specs import device
from strata.parallel.serving_shard import RankShard
from strata.plan.meta_model import find_config, meta_model
from tests.engine.scheduling.plans import request, step

MS = 1e-3
NOTHING = 1e-18
# A step takes 4 ms, and 10 us more for each token; so 1600 fit into 20 ms.
TIMES = StepTimes(4 * MS, NOTHING, NOTHING, 0.01 * MS, NOTHING, NOTHING, NOTHING)
TARGET_SECONDS = 20 * MS


def room(decodes: int, in_line: Iterable[InLine] = (), times: StepTimes = TIMES) -> PromptBudget:
    return PromptBudget(StepTarget(TARGET_SECONDS, times, wait=1.0), decodes, keys=0, in_line=in_line)


def test_what_fits_is_taken_whole_and_what_does_not_ends_with_a_page() -> None:
    of = room(decodes=50)
    assert of.chunk(0, 1000, most=8192, page_size=16) == 1000
    of.take(0, 1000)
    assert of.chunk(0, 549, most=8192, page_size=16) == 549
    assert of.chunk(0, 555, most=8192, page_size=16) == 544  # of 549 to 550
    assert of.chunk(7, 555, most=8192, page_size=16) == 537
    assert of.chunk(0, 555, most=100, page_size=16) == 96


def test_a_divided_prompt_ends_where_the_step_needs_no_padding() -> None:
    of = PromptBudget(StepTarget(20 * MS, TIMES, (512, 1024, 1200, 1600)), 50, 0, ())
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
    two = replace(TIMES, captured=8192, division=ShardingTimes(2, 1024, 1 * MS, 0.0, captured=8192))
    of = room(decodes=50, times=two)
    assert of.chunk(0, 2940, most=8192, page_size=16) == 2940
    assert of.chunk(0, 5000, most=8192, page_size=16) == 2944  # of 2949 to 2950
    of = PromptBudget(StepTarget(20 * MS, two, (512, 1024, 2048, 2560, 3072)), 50, 0, ())
    assert of.chunk(0, 5000, most=8192, page_size=16) == 2496  # which are 14 less than 2,560 tokens of the step
    of.take(0, 2496)
    assert of.chunk(0, 5000, most=8192, page_size=16) == 448  # of 454, all that is left
    # In 10 ms 1,004 tokens of a divided step would fit, which is too short for one.
    short = PromptBudget(StepTarget(10 * MS, two), 1, 0, ())
    assert short.chunk(0, 5000, most=8192, page_size=16) == 592  # of 601


def test_ranks_divide_no_step_of_decodes_alone() -> None:
    """2,600 of them take 30 ms on two ranks as on one, and with a prompt 2.5 times that, 75 ms."""
    two = replace(TIMES, captured=8192, division=ShardingTimes(2, 1024, 1 * MS, 0.0, captured=8192))
    assert room(decodes=2600).chunk(0, 9000, most=8192, page_size=16) == 4496  # of 7,100 tokens in all
    # Of 14,000 in all: divided a step takes 5 ms, and 5 us more for each token.
    assert room(decodes=2600, times=two).chunk(0, 12_000, most=12_000, page_size=16) == 11_392


def test_what_a_prompt_has_to_get_is_padded() -> None:
    slow = StepTimes(1.0, NOTHING, NOTHING, 1.0, NOTHING, 1.0, 1.0)
    of = PromptBudget(StepTarget(20 * MS, slow, (128, 256, 512)), 50, 0, ())
    assert of.chunk(0, 5000, most=8192, page_size=16) == MIN_TOKENS


def test_who_comes_after_a_full_step_gets_nothing() -> None:
    of = room(decodes=50)
    of.take(0, 1545)
    assert of.chunk(0, 100, most=8192, page_size=16) == 0


def test_the_first_prompt_gets_on_however_long_decodes_take() -> None:
    slow = StepTimes(1.0, NOTHING, NOTHING, 1.0, NOTHING, 1.0, 1.0)
    of = room(decodes=50, times=slow)
    assert of.chunk(100_000, 5000, most=8192, page_size=16) == MIN_TOKENS
    assert of.chunk(100_000, 5000, most=5, page_size=16) == 5
    of.take(0, MIN_TOKENS - 20)
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
    of = PromptBudget(StepTarget(20 * MS, slow, (256, 448, 512), padded=(6000, 448)), 50, 0, ())
    assert of.chunk(5984, 5000, most=8192, page_size=16) == MIN_TOKENS
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


BY_HAND = StepTimes(step=1, weights=10, product=0.5, token=0.25, sequence=2, key=0.125, pair=0.0625)


def test_a_step_takes_what_counting_gives() -> None:
    decodes = BY_HAND.decodes(sequences=3, keys=40)
    assert decodes == 3 * 0.25 + 3 * 2 + 40 * 0.125 == 11.75
    # Queries at 6, 7, 8 and 9 see 7, 8, 9 and 10 keys: 34 pairs.
    chunk = BY_HAND.chunk(start=6, count=4)
    assert chunk == 4 * 0.25 + 2 + 10 * 0.125 + 34 * 0.0625 == 6.375
    assert BY_HAND.total(3 + 4, decodes + chunk) == 1 + 10 + 11.75 + 6.375
    assert BY_HAND.total(30, 0) == 1 + 30 * 0.5, "products take longer than reading the weights"
    launched = replace(BY_HAND, captured=30, launch=18)
    assert [launched.total(tokens, 0) for tokens in (30, 31, 40)] == [16, 18, 21]


def test_a_step_that_is_launched_by_the_host_has_to_be_allowed_its_time() -> None:
    times = replace(BY_HAND, captured=1000, launch=50_000)
    assert BY_HAND.longest(49_999, 100, 0, start=0) > 900
    assert times.longest(49_999, 100, 0, start=0) == 900
    assert times.longest(49_999, 1200, 0, start=0) == 0
    assert times.longest(50_000, 100, 0, start=0) == BY_HAND.longest(50_000, 100, 0, start=0)


def test_messages_beside_products_count_in_steps_that_have_them() -> None:
    times = replace(BY_HAND, overlapped=40, hidden=0.125)
    assert [BY_HAND.total(tokens, 0) - times.total(tokens, 0) for tokens in (39, 40, 80)] == [0, 5, 10]
    long, short = (times.total(tokens, times.chunk(0, tokens)) for tokens in (40, 39))
    assert times.longest(long, 0, 0, start=0) == 40
    assert times.longest(short, 0, 0, start=0) == 40, "which takes less time than 39"
    assert times.longest(long - 1, 0, 0, start=0) == BY_HAND.longest(long - 1, 0, 0, start=0) < 39


RANDOM_TIMES = st.builds(StepTimes, *[st.floats(1e-9, 1e-2)] * 7, st.integers(0, 10_000), st.sampled_from([0, 0.05]))


DIVISIONS = st.builds(
    ShardingTimes,
    st.integers(2, 8),
    st.integers(1, 4000),
    st.floats(0, 1e-2),
    st.floats(0, 1e-5),
    st.sampled_from([0, 2000, 10_000]),
)


def test_a_step_that_ranks_divide_takes_what_counting_gives() -> None:
    times = replace(BY_HAND, division=ShardingTimes(4, least=100, message=3, token=0.125, captured=200))
    others = times.chunk(0, 100)
    assert times.total(99, others) == times.undivided(99, others) == BY_HAND.total(99, others)
    # Products of 100 tokens 50 s, of a rank 12.5, and 3/4 of the tokens come from others.
    assert times.total(100, others) == 1 + 3 + 12.5 + others / 4 + 100 * 0.75 * 0.125
    assert times.total(16, 0.0) == BY_HAND.total(16, 0.0)
    launched = replace(times, captured=1000, launch=80)
    assert launched.total(201, 0) == 80, "the division is launched by the host, and the step is not"
    assert launched.total(300, 0) == 80
    assert launched.total(150, 0) == 1 + 3 + 150 * 0.125 + 150 * 0.75 * 0.125


def test_decodes_wait_for_more_tokens_of_prompts_where_ranks_divide_them() -> None:
    """8B on two H200 in steps of 20 ms, beside 32 decodes behind 1,000 tokens each."""
    times = of("8B")
    divided = replace(times, captured=8192, division=ShardingTimes(2, 1024, 0.94e-3, 0.48e-6, 8192))
    given = 0.02, 32, times.decodes(32, 32_000), 0
    alone, together = (one.longest(*given) for one in (replace(times, captured=8192), divided))
    assert 750 < alone < 850
    assert 1450 < together < 1600


@given(
    times=st.builds(
        lambda times, overlapped, share, division: replace(
            times, overlapped=overlapped, hidden=times.token * share, division=division
        ),
        RANDOM_TIMES,
        st.integers(0, 2000),
        st.floats(0, 0.9),
        st.none() | DIVISIONS,
    ),
    seconds=st.floats(0, 0.1),
    decodes=st.integers(0, 300),
    keys=st.integers(0, 200_000),
    start=st.integers(0, 100_000),
)
def test_the_longest_chunk_takes_the_time_and_one_more_token_would_not(
    times: StepTimes, seconds: float, decodes: int, keys: int, start: int
) -> None:
    others = times.decodes(decodes, keys)
    count = times.longest(seconds, decodes, others, start)

    def total(count: int) -> float:
        return times.total(decodes + count, others + times.chunk(start, count))

    assert count == 0 or total(count) <= seconds * (1 + 1e-9)
    assert total(count + 1) >= seconds * (1 - 1e-9)


def test_steps_of_prompts_on_two_ranks_are_predicted_as_they_were_measured() -> None:
    """T4 of 8B on two H200, in steps of four prompts of 2,048 tokens: 72,900 tokens/s, 79,300 with messages beside
    products; 43,800 on one."""
    two = of("8B", 2)
    for times, measured in ((of("8B"), 43_800), (two, 79_300), (replace(two, overlapped=0), 72_900)):
        seconds = times.total(8192, 4 * times.chunk(0, 2048))
        assert 8192 / seconds == pytest.approx(measured, rel=0.1)  # what is between steps counts in those


@cache
def model_of(name: str, ranks: int) -> MetaModel:
    """Of the first of so many ranks."""
    config = find_config(name)
    return meta_model(config, device("h200"), shard=None if ranks == 1 else RankShard.of(config, ranks, 0))


@cache
def of(name: str, ranks: int = 1) -> StepTimes:
    found = step_times(model_of(name, ranks), "NVIDIA H200", {"0.6B": 5632}.get(name, 2048))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "measured", "near"),
    [
        ("8B", {(128,): 6.9, (512,): 14.3, (512,) * 4: 48.5}, 0.15),
        ("0.6B", {(128,): 2.0, (512,): 3.2, (512,) * 4: 6.0}, 0.4),  # the exact model has 2.3 for the first
    ],
)
def test_predictions_are_near_what_kernels_took_on_an_h200(
    name: str, measured: dict[tuple[int, ...], float], near: float
) -> None:
    """Milliseconds of the kernels of steps with 32 decodes at 576 tokens beside prompts."""
    times = replace(of(name), launch=0.0)
    for prompts, took in measured.items():
        others = times.decodes(32, 32 * 576) + sum(times.chunk(0, prompt) for prompt in prompts)
        assert times.total(32 + sum(prompts), others) / MS == pytest.approx(took, rel=near)


def test_attention_to_a_long_prefix_makes_chunks_short() -> None:
    times = replace(of("0.6B"), launch=0.0)
    assert times.chunk(12_288, 4096) > 20 * MS
    chunks = [times.longest(20 * MS, 50, times.decodes(50, 50 * 576), start) for start in (0, 4096, 16_384, 65_536)]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] > 4096 > chunks[2] > 1024 > chunks[3] > 256


def test_nothing_is_predicted_where_the_device_or_its_peak_is_not_known() -> None:
    model = model_of("0.6B", 1)
    assert step_times(model, "NVIDIA T1000", 2048) is None
    doubles = model.of_sizes(pool=PoolShape(28, 16, 8, 128, torch.float64))
    assert step_times(doubles, "NVIDIA H200", 2048) is None


def test_messages_over_a_link_that_is_not_known_take_no_time() -> None:
    config, card = find_config("0.6B").with_layers((0, 1)), device("rtx4090")
    shard = RankShard.of(config, 2, 0)
    two = step_times(meta_model(config, card, shard=shard), card.product, 8192)
    one = step_times(meta_model(config, card), card.product, 8192)
    assert one is not None
    assert two is not None
    assert two.total(4096, two.chunk(0, 4096)) < one.total(4096, one.chunk(0, 4096))
