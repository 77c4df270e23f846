"""Predicted steps by hand: what was measured, what follows from the roofline, messages and launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from strata.cost.attention_times import TIMES as ATTENTION_TIMES
from strata.cost.evidence import Evidence, calls_of
from strata.cost.extrapolated_device import ExtrapolatedDevice
from strata.cost.nodes import NodeCost
from strata.cost.predict import HOST_SECONDS, StepPredictor
from strata.cost.quantized_times import TIMES
from strata.hardware.figures import Device, Figure, Source, promised
from strata.hardware.links import HIDDEN, Link
from strata.hardware.prediction import Call, Prediction
from strata.hardware.roofline import Cost, Workload
from strata.hardware.specs import device
from strata.kernels import tuned
from strata.kernels.quant.schemes import SCHEMES
from strata.kernels.tuned import Key, Table, TunedChoice

# 100 TFLOP/s, 1 TB/s; a kernel takes 2 us in a graph.
DEVICE = Device(
    "a",
    "a device",
    (
        *promised(Source("", "", ""), bandwidth=1.0, dense={"bfloat16": 100}),
        Figure("kernel", 2e-6, "", "", measured=True),
    ),
)
TABLE: Table = {
    Key(operation, "bfloat16", 4096, 1024, rows): TunedChoice("small M", {}, seconds, seconds)
    for operation, rows, seconds in (("linear", 4, 12e-6), ("linear", 16, 16e-6), ("linear_add", 4, 14e-6))
}
DECODES = Workload((1,) * 4, (100,) * 4)


def node(operation: str, rows: int = 0, kernels: int = 1, **cost: int) -> NodeCost:
    """A product of so many rows, or, without rows, whatever has the cost."""
    weight = (4096, 1024) if rows else None
    shape = (rows, 4096) if rows else (1,)
    found = Cost(2 * rows * 4096 * 1024, 2 * 4096 * 1024, weights=2 * 4096 * 1024) if rows else Cost(**cost)
    return NodeCost(operation, operation, 0, "", found, shape, {}, "", ("a kernel",) * kernels, weight)


def predictor(
    calls: dict[str, list[Call]] | None = None,
    link: Link | None = None,
    ranks: int = 1,
    table: Table = TABLE,
    **of: Any,
) -> StepPredictor:
    """By calls, and those of a table of tuned kernels. of: of the evidence, the device among it."""
    known = calls_of(table)
    for operation, found in (calls or {}).items():
        known.setdefault(operation, []).extend(found)
    return StepPredictor.of(Evidence(**{"device": DEVICE, "calls": known} | of), "bfloat16", link, ranks)


def test_products_take_what_their_operation_took() -> None:
    found = predictor()
    assert found.node(node("linear", 4), DECODES) == Prediction(pytest.approx(12e-6), "measured")
    assert found.node(node("linear_add", 4), DECODES) == Prediction(pytest.approx(14e-6), "measured")
    # Of an operation that nobody measured, the product alone; between the numbers of rows.
    other = found.node(node("linear_silu_mul", 8), DECODES)
    assert other.origin == "interpolated"
    assert 12e-6 < other.seconds < 16e-6


def test_nothing_that_was_borrowed_is_measured() -> None:
    loan = ExtrapolatedDevice(device("h200"), device("h100"))
    lent = {"rms_norm": [("traffic", "bfloat16", (48_000_000,), 20e-6)], **calls_of(tuned.read("NVIDIA H200"))}
    found = predictor(loan.calls(lent), table={}, device=loan.device(), loan=loan)
    norm = found.node(node("rms_norm", read=48_000_000), DECODES)
    assert norm == Prediction(pytest.approx(1.15e-6 + (20e-6 - 1.15e-6) * 4.8 / 3.35), "interpolated")
    # The lender's tuned products and constants, by the borrower's memory.
    key, choice = next(
        (key, choice)
        for key, choice in tuned.read("NVIDIA H200").items()
        if key.operation == "linear" and key.rows == 1
    )
    product = replace(node("linear", 1), weight=(key.out, key.width))
    own = predictor(table=tuned.read("NVIDIA H200"), device=device("h200")).node(product, DECODES)
    assert own == Prediction(pytest.approx(choice.seconds), "measured")
    borrowed = found.node(product, DECODES)
    assert borrowed.origin == "interpolated"
    assert borrowed.seconds == pytest.approx(1.15e-6 + (choice.seconds - 1.15e-6) * 4.8 / 3.35)
    for lent, mine in (
        (ATTENTION_TIMES["NVIDIA H200"], found.attention_times),
        (TIMES["NVIDIA H200"], found.quantized_times),
    ):
        assert mine is not None
        assert mine.bandwidth == pytest.approx(lent.bandwidth * 3.35 / 4.8)
    assert found.attention_times is not None
    assert found.attention_times.repeated == ATTENTION_TIMES["NVIDIA H200"].repeated  # from the processors' own cache


def test_whatever_else_is_the_roofline_and_no_less_than_its_kernels() -> None:
    found = predictor()
    assert found.node(node("norm", read=5 * 10**6), DECODES) == Prediction(pytest.approx(5e-6), "analytic")
    assert found.node(node("norm", read=100, kernels=2), DECODES) == Prediction(pytest.approx(4e-6), "analytic")


def test_decode_attention_is_by_sequences_and_bytes_of_each() -> None:
    calls = {"decode_attention": [("decode", "bfloat16", (count, 2, 10**6), count * 1e-6 + 8e-6) for count in (4, 16)]}
    attention = node("attention", flops=8 * 10**6, read=4 * 10**6, cached=4 * 10**6)
    assert predictor(calls=calls).node(attention, DECODES) == Prediction(pytest.approx(12e-6), "measured")
    assert predictor().node(attention, DECODES) == Prediction(pytest.approx(4e-6), "analytic")
    prompt = Workload((4,), (4,))  # attends otherwise
    assert predictor(calls=calls).node(attention, prompt) == Prediction(pytest.approx(4e-6), "analytic")


def test_prompts_attend_by_a_start_and_a_rate_beside_decodes() -> None:
    shapes = [(1, 1, tokens, 0, 64) for tokens in (100, 1000)]
    flops = {shape: 4 * 64 * shape[2] * (shape[2] + 1) // 2 for shape in shapes}
    prompts = [("prompt", "bfloat16", shape, 5e-6 + flops[shape] / 1e12) for shape in shapes]
    decodes = [("decode", "bfloat16", (4, 1, 100_000), 9e-6)]
    found = predictor(calls={"attention": prompts, "decode_attention": decodes})
    # A head of 64, and 1,000 bytes of keys and values a token. Two prompts, one of which has 500 tokens cached.
    pairs = 500 * 501 // 2 + 500 * 500 + 500 * 501 // 2
    two = Workload((500, 500), (500, 1000))
    attention = node("attention", flops=256 * pairs, read=10**6, cached=1_500_000)
    alone = found.node(attention, two)
    assert alone == Prediction(pytest.approx(5e-6 + 256 * pairs / 1e12), "interpolated")
    # Four sequences of 100 tokens decode beside them.
    beside = Workload((1,) * 4 + two.new, (100,) * 4 + two.total)
    attention = node("attention", flops=256 * (pairs + 400), read=10**6, cached=1_900_000)
    assert found.node(attention, beside).seconds == pytest.approx(alone.seconds + 9e-6)


def test_large_products_take_no_less_than_the_device_holds() -> None:
    held = replace(DEVICE, figures=(*DEVICE.figures, Figure("sustained", 50e12, "", "", "bfloat16", measured=True)))
    large: Table = {Key("linear", "bfloat16", 4096, 1024, 8192): TunedChoice("cublas", {}, 1e-3, 1e-3)}
    rows = 2 * 8192 * 4096 * 1024
    burst = predictor(table=large).node(node("linear", 8192), DECODES)
    assert burst == Prediction(pytest.approx(1e-3), "measured")
    longer = predictor(table=large, device=held).node(node("linear", 8192), DECODES)
    assert longer == Prediction(pytest.approx(rows / 50e12), "interpolated")


def test_the_surer_of_the_fused_product_and_the_plain_one_counts() -> None:
    found = predictor(calls={"linear_silu_mul": [("product", "bfloat16", (4096, 4096, 1024), 1e-3)]})
    assert found.node(node("linear_silu_mul", 4), DECODES) == Prediction(pytest.approx(12e-6), "measured")
    assert found.node(node("linear_silu_mul", 4096), DECODES) == Prediction(pytest.approx(1e-3), "measured")


def test_what_passes_over_memory_goes_by_its_bytes() -> None:
    norms = [("traffic", "bfloat16", (nbytes,), nbytes / 1e12 + 3e-6) for nbytes in (10**6, 10**8)]
    found = predictor(calls={"rms_norm": norms})
    small = found.node(node("rms_norm", read=10**6 // 2, written=10**6 // 2), DECODES)
    assert small == Prediction(pytest.approx(4e-6), "measured")
    middle = found.node(node("rms_norm", read=10**7), DECODES)
    assert middle.origin == "interpolated"
    assert 4e-6 < middle.seconds < 103e-6
    assert found.node(node("add_rms_norm", read=10**7), DECODES).seconds == pytest.approx(1e-5)


def test_messages_take_their_links_time() -> None:
    reduced = node("all_reduce", messages=1, sent=10**6)
    linked = predictor(link=Link(20e-6, 3e-6, 1e11, "", ""))
    assert linked.node(reduced, DECODES) == Prediction(pytest.approx(13e-6), "analytic")


SUMS = [
    (algorithm, "bfloat16", (2, nbytes), start + nbytes * 1e-12)
    for algorithm, start in (("one shot", 3e-6), ("one shot and norm", 4e-6), ("nccl", 7e-6))
    for nbytes in (1000, 10**8)
]


def sum_of(operation: str, *kernels: str) -> NodeCost:
    """Of 1000 rows of 1000 between two ranks."""
    sent = Cost(read=2 * 10**6, written=2 * 10**6, messages=1, sent=2 * 10**6)
    return replace(node(operation, messages=1), cost=sent, kernels=kernels, shape=(1000, 1000))


def test_sums_over_ranks_go_by_the_algorithm_of_their_kernel() -> None:
    link = Link(20e-6, 3e-6, 1e11, "", "")
    found = predictor(link=link, calls={"all_reduce": SUMS}, ranks=2)

    def seconds(operation: str, *kernels: str) -> Any:
        return found.node(sum_of(operation, *kernels), DECODES).seconds

    assert seconds("all_reduce", "one_shot_kernel") == pytest.approx(5e-6)
    assert seconds("all_reduce", "(ATen)", "(NCCL)") == pytest.approx(9e-6)
    assert seconds("all_reduce_add_rms_norm", "one_shot_norm_kernel") == pytest.approx(6e-6)
    # The norm that is a kernel of its own moves four times the bytes, at 1 TB/s.
    assert seconds("all_reduce_add_rms_norm", "one_shot_kernel", "rms_norm_kernel") == pytest.approx(13e-6)
    # A product that is sent, 16 us, and its message of as many bytes.
    product = replace(
        node("linear_all_reduce_add_rms_norm", 16), kernels=("dot_kernel", "one_shot_received_norm_kernel")
    )
    product = replace(product, cost=product.cost + Cost(messages=1, sent=2 * 10**6), shape=(16, 62500))
    assert found.node(product, DECODES).seconds == pytest.approx(16e-6 + 6e-6)
    assert seconds("all_gather", "(NCCL)") == pytest.approx(9e-6)
    assert seconds("all_gather", "gather_rows_kernel") == pytest.approx(5e-6)
    # Of an algorithm that nobody measured, the link.
    assert seconds("all_reduce", "two_shot_kernel") == pytest.approx(3e-6 + 2e-5)


def test_sums_that_were_begun_travel_beside_what_runs_until_they_are_waited_for() -> None:
    found = predictor(link=Link(20e-6, 3e-6, 1e11, "", ""), calls={"all_reduce": SUMS}, ranks=2)
    begun, waited = sum_of("start_all_reduce", "(NCCL)"), node("finish_all_reduce", kernels=0)  # 9 us

    def seconds(*nodes: NodeCost) -> Any:
        return found.step(nodes, DECODES, captured=True).seconds

    long, short = node("norm", read=20 * 10**6), node("norm", read=5 * 10**6)  # 20 and 5 us
    # All but what it takes of the device is hidden.
    assert seconds(begun, long, waited, short) == pytest.approx(25e-6 + (1 - HIDDEN) * 9e-6)
    # 4 us of it are left when it is waited for, which is more than that.
    assert seconds(begun, short, waited, short) == pytest.approx(14e-6)
    # The second travels once the first has arrived.
    assert seconds(begun, short, begun, short, waited, waited) == pytest.approx(18e-6)
    assert seconds(short, begun) == pytest.approx(14e-6)


def test_a_step_is_the_sum_or_waits_for_the_host() -> None:
    nodes = [node("linear", 4), node("linear_add", 4), node("norm", read=100)]
    assert predictor().step(nodes, DECODES, captured=True) == Prediction(pytest.approx(28e-6), "analytic")
    assert predictor().step(nodes[:2], DECODES, captured=True).origin == "measured"
    launched = predictor().step(nodes, DECODES, captured=False)
    assert launched == Prediction(pytest.approx(3 * HOST_SECONDS), "analytic")
    host = replace(predictor(), launch=0.0)
    assert host.step(nodes, DECODES, captured=False).seconds == pytest.approx(28e-6), "a processor launches nothing"
    long = [node("norm", read=10**9)]
    assert predictor().step(long, DECODES, captured=False) == predictor().step(long, DECODES, captured=True)


def test_whether_any_call_was_measured() -> None:
    assert predictor().knows_calls
    assert not predictor(table={}).knows_calls
    assert predictor(table={}, device=device("h200")).knows_calls, "attention"


def test_what_is_around_a_step_comes_on_top() -> None:
    around = replace(DEVICE, figures=(*DEVICE.figures, Figure("step", 15e-6, "", "", measured=True)))
    found = predictor(device=around).step([node("linear", 4)], DECODES, captured=True)
    assert found == Prediction(pytest.approx(27e-6), "measured")


def packed(scheme: str, rows: int, *kernels: str) -> NodeCost:
    """A product by a weight [4096, 1024] in a byte each."""
    plain, nbytes = node("linear", rows), 4096 * 1024
    cost = replace(plain.cost, read=nbytes, weights=nbytes)
    return replace(plain, kernels=kernels, cost=cost, scheme=SCHEMES[scheme], quantized_bytes=1.0)


def test_packed_weights_take_their_own_time_where_it_was_measured() -> None:
    times = TIMES["NVIDIA H200"]
    found = replace(predictor(), quantized_times=times)
    one = times.product(SCHEMES["fp8"], 40, (4096, 1024), 4096 * 1024, 0)
    assert one is not None
    assert found.node(packed("fp8", 40, "a kernel"), DECODES).seconds == one
    # Rows that a kernel of its own rounds; and weights that become floats before the plain product.
    by_itself = found.node(packed("fp8", 40, "round_rows_kernel", "a kernel"), DECODES)
    assert by_itself.seconds == pytest.approx(one + times.quantizing(40, 1024, 2))
    expanded = found.node(packed("int4", 300, "dequantize_kernel", "a kernel"), DECODES)
    more = times.expanded(4096 * 1024, 4096 * 1024, 2)
    assert expanded.seconds == pytest.approx(found.node(node("linear", 300), DECODES).seconds + more)


def test_packed_weights_elsewhere_are_as_far_above_their_roofline_as_plain_ones() -> None:
    """Half the bytes in half of the 12 us."""
    found = predictor().node(packed("fp8", 4, "a kernel"), DECODES)
    assert found.seconds == pytest.approx(max(12e-6 / 2, 1.2 * 4096 * 1024 / 1e12))
