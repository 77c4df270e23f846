"""Times of attention against hand counts of the programs that run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strata.cost.attention_times import Attends, AttentionTimes, GroupTimes
from strata.hardware.roofline import Cost, Workload

# Sixteen heads over eight of keys, each of 128: 4,096 bytes of keys and values a token.
ATTENDS = Attends(16, 8, 128, torch.bfloat16, 2, 40_000, None)
KEY_BYTES = 4096
TIMES = AttentionTimes(
    processors=8,
    decode=5e-6,
    join=0.5e-7,
    behind=2e-6,
    bandwidth=1e12,
    groups={1: GroupTimes(1e-6, 1e-8, overlaps=False), 4: GroupTimes(3e-6, 4e-7, overlaps=True)},
    empty=1e-7,
    beside=1e-9,
    softmax=0.25,
    prompts={"fresh": (20e-6, 1e-8), "pages": (10e-6, 2e-8), "tiles": (3e-6, 4e-8)},
    repeated=2e12,
)


def seconds(workload: Workload, attends: Attends, window: int | None = None) -> float:
    pairs = sum(new * (total - new) + new * (new + 1) // 2 for new, total in zip(*_parts(workload), strict=True))
    keys = sum(total if window is None else min(total, window) for total in workload.total)
    found = TIMES.seconds(Cost(4 * 16 * 128 * pairs, cached=keys * KEY_BYTES), workload, attends)
    assert found is not None
    return found


def _parts(workload: Workload) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return workload.new, workload.total


def test_a_long_decode_is_divided_among_programs() -> None:
    # Two sequences have splits of 64 keys and 64 at most, of which 100 keys fill two and 12,800 need 50 of 256 each;
    # whatever their number, a kernel behind joins them.
    short, long = (seconds(Workload((1, 1), (keys, keys)), ATTENDS) for keys in (100, 12_800))
    assert short == pytest.approx(5e-6 + 2e-6 + 200 * KEY_BYTES / 1e12 + 4 * 1e-6)
    assert long == pytest.approx(5e-6 + 2e-6 + 25_600 * KEY_BYTES / 1e12 + 100 * 1e-6)


def test_splits_of_more_sequences_are_joined_one_after_another() -> None:
    few = replace(ATTENDS, sequences=8)  # splits of 128 keys, of which 1,280 keys fill ten
    one = seconds(Workload((1,) * 8, (1280,) * 8), few)
    assert one == pytest.approx(5e-6 + 10 * 1e-7 + 8 * 1280 * KEY_BYTES / 1e12 + 80 * 1e-6)


def test_four_heads_of_a_group_take_longer_to_join_and_have_fewer_splits() -> None:
    # 528 programs, so each of 8 KV heads has eight splits of a sequence, of 160 keys, and two warps do not hide them:
    # 64 us, of which 42 are those in which all keys and values come. Half as many sequences would not take longer.
    wide = replace(ATTENDS, heads=32, sequences=8)
    one = seconds(Workload((1,) * 8, (1280,) * 8), wide)
    assert one == pytest.approx(5e-6 + 8 * 4 * 0.5e-7 + 160 * 4e-7 + 64 * 3e-6)
    few = seconds(Workload((1,) * 8, (1280,) + (640,) * 7), wide)
    assert one - few == pytest.approx(7 * (8 - 5) * 3e-6)  # of 640 keys five splits of 128
    many = seconds(Workload((1,) * 8, (40_000,) * 8), wide)  # eight splits of 5,024 keys: 2 ms, and 1.3 of bytes
    assert many == pytest.approx(5e-6 + 8 * 4 * 0.5e-7 + 5024 * 4e-7 + 64 * 3e-6)


def test_a_step_with_prompts_takes_the_least_of_what_is_beside_them() -> None:
    times = replace(TIMES, beside=1e-3)
    step, cost = Workload((1, 64), (500, 64)), Cost(4 * 16 * 128 * (500 + 64 * 65 // 2), cached=564 * KEY_BYTES)
    attends = replace(ATTENDS, prompts="tiles")
    found, least = times.seconds(cost, step, attends), TIMES.seconds(cost, step, attends)
    assert found is not None
    assert least is not None
    # Sixteen programs of a KV head, two sequences and 64 splits, on each of 8 processors.
    assert found - least == pytest.approx(1e-3 - 128 * 1e-7)


def test_a_kernel_behind_that_is_launched_for_nothing_takes_as_long() -> None:
    found = seconds(Workload((1,), (40,)), ATTENDS)
    assert found == pytest.approx(5e-6 + 2e-6 + 40 * KEY_BYTES / 1e12 + 1e-6)
    none = replace(ATTENDS, most=64)  # no sequence is ever divided
    assert seconds(Workload((1,), (40,)), none) == pytest.approx(found - 2e-6)


def test_a_prompt_by_heads_of_half_the_size_takes_more_than_half_the_time() -> None:
    whole, half = (
        TIMES.seconds(
            Cost(4 * 16 * size * 200 * 201 // 2, cached=200 * 2 * 8 * size * 2),
            Workload((200,), (200,)),
            replace(ATTENDS, head_dim=size, sequences=0, prompts="fresh"),
        )
        for size in (128, 64)
    )
    assert whole is not None
    assert half is not None
    assert half - 20e-6 == pytest.approx((0.25 + 0.75 / 2) * (whole - 20e-6))


def test_memory_of_less_bandwidth_takes_longer_for_keys_alone() -> None:
    slow, decode = TIMES.with_memory(0.5), Workload((1, 1), (12_800, 12_800))
    cost = Cost(4 * 16 * 128 * 25_600, cached=25_600 * KEY_BYTES)
    one, other = (times.seconds(cost, decode, ATTENDS) for times in (TIMES, slow))
    assert one is not None
    assert other == pytest.approx(one + 25_600 * KEY_BYTES / 1e12)


def test_programs_of_two_warps_wait_for_the_longest_split() -> None:
    one = seconds(Workload((1,), (600,)), replace(ATTENDS, sequences=64))  # a split has 768 keys
    assert one == pytest.approx(5e-6 + 600 * KEY_BYTES / 1e12 + 1e-6 + 600 * 1e-8)


def test_few_queries_over_many_keys_take_as_long_as_their_programs() -> None:
    attends = replace(ATTENDS, sequences=0, prompts="tiles")  # 64 queries a tile, 16 programs at a time
    tail = seconds(Workload((60,), (10_000,)), attends)
    assert tail == pytest.approx(3e-6 + 10_000 * 4e-8)
    assert seconds(Workload((128,), (10_000,)), attends) == pytest.approx(tail)  # beside it


def test_a_prompt_that_starts_last_ends_last() -> None:
    attends = replace(ATTENDS, sequences=0, prompts="pages")  # tiles of 128 queries of each of 16 heads
    first = sum(16 * 128 * tile / 8 for tile in range(1, 9))  # of the second prompt, on each of 8 processors
    assert seconds(Workload((100, 1024), (9000, 1024)), attends) == pytest.approx(
        10e-6 + 2e-8 * (first + 2 * 9000 + 9000 / 2)
    )


def test_every_sequence_of_the_recorded_size_gets_programs() -> None:
    small, large = (replace(ATTENDS, sequences=count, prompts="tiles") for count in (16, 256))
    prompt = Workload((50,), (50,))  # 16 of up to 32 splits, 256 of 4
    assert seconds(prompt, large) - seconds(prompt, small) == pytest.approx(1e-7 * 8 / 8 * (256 * 4 - 16 * 32))
    assert seconds(prompt, replace(large, prompts="fresh")) == pytest.approx(20e-6 + 1e-8 * 125)  # it launches none


def test_windows_hide_keys_and_other_costs_are_not_of_attention() -> None:
    decode = Workload((1,), (8000,))
    assert seconds(decode, ATTENDS, window=1000) < seconds(decode, ATTENDS)
    assert TIMES.seconds(Cost(cached=KEY_BYTES), decode, ATTENDS) is None  # a state, without products
    assert TIMES.seconds(Cost(flops=1, cached=576 * 2 * 7999), decode, ATTENDS) is None  # latents
