"""Times of attention and of packed products: counts by hand of the programs that run, and what an H200 took."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from benchmarks.predictions.cases import PredictionCase
from strata.cost.attention_times import Attends, AttentionTimes, GroupTimes
from strata.cost.quantized_times import TIMES, QuantizedTimes
from strata.hardware.roofline import Cost, Workload
from strata.kernels.quant.quantized import Scheme
from strata.kernels.quant.schemes import SCHEMES
from tests.plan.test_predictions import steps

# Sixteen heads over eight of keys, each of 128: 4,096 bytes of keys and values a token.
ATTENDS = Attends(16, 8, 128, torch.bfloat16, 2, 40_000, None)
KEY_BYTES = 4096
ATTENTION = AttentionTimes(
    processors=8,
    decode=5e-6,
    join=0.5e-7,
    behind=2e-6,
    bandwidth=1e12,
    groups={1: GroupTimes(1e-6, 1e-8, overlaps=False), 4: GroupTimes(3e-6, 4e-7, overlaps=True)},
    empty=1e-7,
    beside=1e-9,
    softmax=0.25,
    prompts={"pure_prefill": (20e-6, 1e-8), "pages": (10e-6, 2e-8), "tiles": (3e-6, 4e-8)},
    repeated=2e12,
)


def seconds(workload: Workload, attends: Attends, window: int | None = None) -> float:
    pairs = sum(new * (total - new) + new * (new + 1) // 2 for new, total in zip(*_parts(workload), strict=True))
    keys = sum(total if window is None else min(total, window) for total in workload.total)
    found = ATTENTION.seconds(Cost(4 * 16 * 128 * pairs, cached=keys * KEY_BYTES), workload, attends)
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
    times = replace(ATTENTION, beside=1e-3)
    step, cost = Workload((1, 64), (500, 64)), Cost(4 * 16 * 128 * (500 + 64 * 65 // 2), cached=564 * KEY_BYTES)
    attends = replace(ATTENDS, prompts="tiles")
    found, least = times.seconds(cost, step, attends), ATTENTION.seconds(cost, step, attends)
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
        ATTENTION.seconds(
            Cost(4 * 16 * size * 200 * 201 // 2, cached=200 * 2 * 8 * size * 2),
            Workload((200,), (200,)),
            replace(ATTENDS, head_dim=size, sequences=0, prompts="pure_prefill"),
        )
        for size in (128, 64)
    )
    assert whole is not None
    assert half is not None
    assert half - 20e-6 == pytest.approx((0.25 + 0.75 / 2) * (whole - 20e-6))


def test_memory_of_less_bandwidth_takes_longer_for_keys_alone() -> None:
    slow, decode = ATTENTION.with_memory(0.5), Workload((1, 1), (12_800, 12_800))
    cost = Cost(4 * 16 * 128 * 25_600, cached=25_600 * KEY_BYTES)
    one, other = (times.seconds(cost, decode, ATTENDS) for times in (ATTENTION, slow))
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
    assert seconds(prompt, replace(large, prompts="pure_prefill")) == pytest.approx(
        20e-6 + 1e-8 * 125
    )  # it launches none


def test_windows_hide_keys_and_other_costs_are_not_of_attention() -> None:
    decode = Workload((1,), (8000,))
    assert seconds(decode, ATTENDS, window=1000) < seconds(decode, ATTENDS)
    assert ATTENTION.seconds(Cost(cached=KEY_BYTES), decode, ATTENDS) is None  # a state, without products
    assert ATTENTION.seconds(Cost(flops=1, cached=576 * 2 * 7999), decode, ATTENDS) is None  # latents


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_precision.jsonl"
H200 = TIMES["NVIDIA H200"]
SIZES = {
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
}
# A launch takes a second, a byte one, a value of e4m3 three and of int4 two and half a second a row more; a FLOP in 8
# bits a hundredth.
HAND = QuantizedTimes(
    launch=1.0,
    streaming={"e4m3": 0.75, "int4": 0.25},
    filled=4.0,
    bandwidth=1.0,
    values={"e4m3": 3.0, "int4": 2.0},
    row=0.5,
    tiles=((64, 5.0), (256, 9.0)),
    rates={"": 50.0, "float8": 100.0},
    grouped=0.5,
    rounding=1.0,
    quantizing_bandwidth=3.0,
)


@pytest.mark.parametrize(
    ("scheme", "rows", "seconds"),
    [
        ("fp8", 1, 0.75 + 8),  # streams past the tensor cores
        ("fp8", 2, 1 + 8 * (3 + 4)),  # in tiles of 8 rows
        ("fp8_block", 1, 1 + 8 * (3 + 4)),  # scales of blocks do not stream
        ("fp8", 16, 1 + 8 * (3 + 8)),
        ("fp8_weights", 40, 1 + 8 * (3 + 32)),
        ("fp8", 17, 1 + 8 * 5),
        ("fp8", 65, 1 + 8 * 9),
        ("fp8_block", 64, 1 + 2 * 64 * 8 / 100 + 5),
        ("fp8", 1000, 1 + 2 * 1000 * 8 / 100 + 5),
        ("int4", 2, 1 + 8 * (2 + 4)),
        ("int4", 129, 1 + 8 * (2 + 128)),
        ("int4", 257, None),  # becomes floats in memory
        ("int8", 1, None),  # not measured
    ],
)
def test_a_product_by_hand(scheme: str, rows: int, seconds: float | None) -> None:
    assert HAND.product(SCHEMES[scheme], rows, (2, 4), 8.0, 5.0) == seconds


def test_slower_memory_bounds_what_instructions_took() -> None:
    slow = HAND.with_memory(0.1)  # a byte takes ten seconds
    assert HAND.with_memory(1.0) == HAND
    assert slow.product(SCHEMES["fp8"], 1, (2, 4), 8.0, 5.0) == 0.75 + 80
    assert slow.product(SCHEMES["fp8"], 17, (2, 4), 8.0, 5.0) == 1 + 80  # in place of 40 in tiles
    assert slow.product(SCHEMES["fp8"], 16, (2, 4), 8.0, 5.0) == 1 + 8 * (3 + 8)  # more than that
    assert slow.quantizing(6, 10, 2) == pytest.approx(1 + 60 * 3 / 0.3)


def test_one_row_by_int4_streams_in_chunks_of_32_columns() -> None:
    assert HAND.product(SCHEMES["int4"], 1, (2, 64), 8.0, 5.0) == 0.25 + 8
    assert HAND.product(SCHEMES["int4"], 1, (2, 4), 8.0, 5.0) == 1 + 8 * (2 + 4)


def test_small_weights_have_less_of_a_launch() -> None:
    assert HAND.product(SCHEMES["fp8"], 1, (1, 2), 2.0, 5.0) == 0.375 + 2


@pytest.mark.parametrize(
    ("scheme", "tokens", "flops", "seconds"),
    [
        ("fp8", 1, 16.0, 2 + 8),
        ("int4", 1, 16.0, 4 + 8 * 2.5),
        ("fp8", 2, 32.0, 4 + 8 * 4),  # two rows an expert are converted
        ("fp8", 3, 48.0, 6 + 8),
        ("fp8", 100, 1600.0, 6 + 1600 / (0.5 * 100)),
    ],
)
def test_experts_by_hand(scheme: str, tokens: int, flops: float, seconds: float) -> None:
    assert HAND.experts(SCHEMES[scheme], tokens, 8.0, flops, 8.0) == seconds


def test_experts_in_floats_by_hand() -> None:
    """A token's in two launches; else with the order and the sum, by their bytes or at a share of the peak."""
    assert HAND.plain_experts(1, 1e6, 10.0) == 2 + 10
    assert HAND.plain_experts(2, 100.0, 10.0) == 4 + 10
    assert HAND.plain_experts(500, 1000.0, 10.0) == 4 + 1000 / (0.5 * 50)


def test_what_else_is_launched_by_hand() -> None:
    assert HAND.expanded(8.0, 4.0, 2) == 1 + 4 + 2 * 8
    assert HAND.quantizing(3, 5, 2) == 1 + 3 * 5 * 3 / 3
    assert HAND.product(Scheme("2:4", 0, 0), 1, (2, 4), 8.0, 5.0) is None


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def test_experts_that_were_measured(measured: list[dict[str, Any]]) -> None:
    of_expert, count, chosen = 3 * 768 * 2048, 128, 8
    lines = [line for line in measured if line.get("part") == "experts" and line["is_rule"]]
    assert {line["tokens"] for line in lines} == {1, 64}
    for line in lines:
        rows = line["tokens"] * chosen
        weights = min(count, rows) * of_expert  # choices fell evenly
        found = H200.experts(SCHEMES["fp8"], line["tokens"], weights, 2 * rows * of_expert, weights)
        assert found == pytest.approx(line["us"] * 1e-6, rel=0.03)


def test_products_of_many_rows_that_were_measured(measured: list[dict[str, Any]]) -> None:
    lines = [line for line in measured if line.get("scheme") == "int8" and "product" in line]
    assert len(lines) == 8
    for line in lines:
        (out, width), rows = SIZES[line["model"]][line["product"]], line["rows"]
        found = H200.product(SCHEMES["int8"], rows, (out, width), out * width, 2 * rows * out)
        assert found is not None
        assert found + H200.quantizing(rows, width, 2) == pytest.approx(line["us"] * 1e-6, rel=0.04)


def test_products_of_129_to_256_rows_that_were_measured() -> None:
    """Four products of a layer, one after the other, by the tiles that are chosen now."""
    lines = [json.loads(line) for line in RESULTS.with_name("h200_packed.jsonl").read_text().splitlines()]
    layers = {line["layer"]: line["fastest_us"] for line in lines if line.get("layer", 0) > 128}
    assert set(layers) == {136, 160, 192, 224, 256}
    for rows, us in layers.items():
        each = [H200.product(SCHEMES["fp8"], rows, shape, shape[0] * shape[1], 0.0) for shape in SIZES["8B"].values()]
        start = sum(H200.launch for _ in each)  # a chain's kernels overlap, a step's begin behind others
        assert sum(one or 0.0 for one in each) - start == pytest.approx(us * 1e-6, rel=0.08)


def test_products_in_decode_steps_that_were_profiled(measured: list[dict[str, Any]]) -> None:
    """Prompts of 700 tokens come in steps of 8,192, so that answers end one group after the other: steps have fewer
    and fewer rows. At that commit steps of more than 32 launched what was profiled; those of 240 sequences, of up to
    182 rows, have other tiles since."""
    lines = [line for line in measured if line.get("test") == "profiled decodes"]
    assert [line["sequences"] for line in lines] == [64, 128, 240]
    for line in lines[:2]:
        case = PredictionCase("profiled", ((line["sequences"], line["prompt"], line["answer"]),))
        rows = [len(workload.new) for kind, workload in steps(case) if kind == "decode"]
        large = [count for count in rows if count > 32]
        # Of 128 sequences one step more.
        assert line["launches"] * line["steps"] // 128 - len(large) in (0, 1)
        layers = [
            [H200.product(SCHEMES["fp8"], count, shape, shape[0] * shape[1], 0.0) for shape in SIZES["8B"].values()]
            for count in large
        ]
        found = fmean(sum(seconds or 0.0 for seconds in layer) for layer in layers)
        assert found == pytest.approx(4e-6 * line["us"] / line["launches"], rel=0.02)


def test_products_of_few_rows_that_were_measured() -> None:
    """e4m3 that becomes bfloat16, microseconds (docs/log.md, `quantized_rows`)."""
    scheme = SCHEMES["fp8_weights"]
    took = {(64, "qkv"): 16, (64, "o"): 11, (64, "gate_up"): 49, (64, "down"): 27.5, (2, "gate_up"): 35}
    for (rows, name), microseconds in took.items():
        out, width = SIZES["8B"][name]
        found = H200.product(scheme, rows, (out, width), out * width, 0.0)
        assert found == pytest.approx(microseconds * 1e-6, rel=0.11), name
    # A layer; 32 rows have the tiles of 64.
    for rows, microseconds in ((32, 113), (64, 104)):
        each = [H200.product(scheme, rows, shape, shape[0] * shape[1], 0.0) for shape in SIZES["8B"].values()]
        assert sum(one or 0.0 for one in each) == pytest.approx(microseconds * 1e-6, rel=0.08)
