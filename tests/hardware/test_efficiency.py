"""Predicted times: exact where something was measured, between it elsewhere, by hand count; by a start and a rate."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.cost.efficiency import KINDS, EfficiencyTable, attention_cost, product_cost
from strata.hardware.figures import Device, Source, promised
from strata.hardware.measured import path_of, read, write
from strata.hardware.prediction import ORIGINS, Call, FittedTimes, Prediction
from strata.hardware.roofline import Cost
from strata.hardware.specs import device

# 100 TFLOP/s and 1 TB/s.
DEVICE = Device(
    "a", "a device", promised(Source("", "", ""), bandwidth=1.0, dense={"bfloat16": 100, "float8": 200, "float32": 1})
)


def floor(shape: tuple[int, ...]) -> float:
    cost = product_cost("bfloat16", shape)
    return max(cost.flops / 100e12, cost.bytes / 1e12)


def table(utilizations: dict[tuple[int, ...], float]) -> EfficiencyTable:
    return EfficiencyTable.of(DEVICE, products({shape: floor(shape) / value for shape, value in utilizations.items()}))


def products(seconds: dict[tuple[int, ...], float]) -> Iterable[tuple[str, str, tuple[int, ...], float]]:
    return [("product", "bfloat16", shape, value) for shape, value in seconds.items()]


def predict(known: EfficiencyTable, *shape: int) -> Prediction:
    return known.predict("product", "bfloat16", shape)


def test_costs_by_hand() -> None:
    assert product_cost("bfloat16", (2, 3, 5)) == Cost(60, 20 + 30, 12, 30)
    assert product_cost("float8", (2, 3, 5)) == Cost(60, 10 + 15, 12, 15)
    # Two sequences of 3 tokens, a head of 4: 6 pairs of 2 * 2 * 4 each; q, k, v read and one written, 24 numbers each.
    assert attention_cost("bfloat16", (2, 1, 3, 4)) == Cost(2 * 6 * 16, 3 * 48, 48)


def test_between_two_sizes_the_utilization_is_linear_in_the_logarithm() -> None:
    known = table({(4, 64, 64): 0.5, (16, 64, 64): 0.58})
    # 8192 bytes of weight and 4 rows of 128 bytes in and out, at 1 TB/s.
    assert predict(known, 4, 64, 64) == Prediction(pytest.approx(9.216e-9 / 0.5), "measured")
    assert predict(known, 8, 64, 64) == Prediction(pytest.approx(10.24e-9 / 0.54), "interpolated")


def test_more_rows_are_not_quicker_where_the_utilization_rises_faster_than_the_floor() -> None:
    known = table({(4, 64, 64): 0.5, (16, 64, 64): 0.66})  # 18.43 and 18.62 ns; 8 rows at 0.58 would take 17.66
    assert predict(known, 8, 64, 64).seconds == pytest.approx(9.216e-9 / 0.5)


def test_beyond_what_was_measured_the_nearest_tells_and_it_is_analytic() -> None:
    known = table({(4, 64, 64): 0.5, (16, 64, 64): 0.8})
    assert predict(known, 64, 64, 64) == Prediction(pytest.approx(floor((64, 64, 64)) / 0.8), "analytic")
    assert predict(known, 4, 128, 64) == Prediction(pytest.approx(floor((4, 128, 64)) / 0.5), "analytic")
    # A smaller call begins and ends as the smallest that was measured.
    assert predict(known, 1, 64, 64).seconds == pytest.approx(floor((1, 64, 64)) + floor((4, 64, 64)))


def test_between_weights_the_nearest_tell_most() -> None:
    known = table({(1, 64, 64): 0.4, (8, 64, 64): 0.4, (1, 256, 64): 0.8, (8, 256, 64): 0.8})
    middle = predict(known, 2, 128, 64)
    assert middle == Prediction(pytest.approx(floor((2, 128, 64)) / 0.6), "interpolated")  # as far from both
    near = predict(known, 2, 72, 64)
    assert floor((2, 72, 64)) / 0.6 < near.seconds < floor((2, 72, 64)) / 0.4


def test_far_weights_tell_nothing() -> None:
    near = {(1, 64, 64): 0.4, (8, 64, 64): 0.4, (1, 256, 64): 0.8, (8, 256, 64): 0.8}
    far = {(rows, out, 4096): 0.1 for rows in (1, 8) for out in (4096, 8192, 16384)}
    assert predict(table(near | far), 2, 128, 64) == predict(table(near), 2, 128, 64)


def test_without_measurements_it_is_the_roofline() -> None:
    empty = EfficiencyTable.of(DEVICE, [])
    assert predict(empty, 4096, 4096, 4096) == Prediction(pytest.approx(2 * 4096**3 / 100e12), "analytic")
    assert predict(empty, 1, 4096, 4096).seconds == pytest.approx((2 * 4096**2 + 4 * 4096) / 1e12)


def test_of_a_shape_that_comes_twice_the_quickest_counts() -> None:
    known = EfficiencyTable.of(DEVICE, [*products({(4, 64, 64): 2e-6}), *products({(4, 64, 64): 1e-6})])
    assert predict(known, 4, 64, 64).seconds == pytest.approx(1e-6)


def test_what_has_no_cost_or_peak_is_left_out_and_asking_for_it_is_an_error() -> None:
    known = EfficiencyTable.of(DEVICE, [("copy", "bfloat16", (4,), 1.0), ("product", "int8", (4, 4, 4), 1.0)])
    assert known.columns == {}
    with pytest.raises(ValueError, match="no compute in int8 is recorded for a; known: bfloat16, float32, float8"):
        known.predict("product", "int8", (4, 4, 4))
    with pytest.raises(
        ValueError, match="kind 'copy' is unknown; known are product, attention, prompt, decode, traffic"
    ):
        known.predict("copy", "bfloat16", (4,))
    with pytest.raises(ValueError, match="dtype 'int3' has no size here; known are float32"):
        known.predict("product", "int3", (4, 4, 4))


SIZES = st.integers(1, 4096)
WEIGHTS = st.tuples(st.sampled_from([64, 1024, 4096]), st.sampled_from([64, 512]))
MEASURED = st.dictionaries(
    st.tuples(SIZES, WEIGHTS).map(lambda one: (one[0], *one[1])), st.floats(0.01, 1.0), min_size=1, max_size=12
)


@given(MEASURED, SIZES, WEIGHTS)
def test_properties_of_all_tables(
    utilizations: dict[tuple[int, ...], float], rows: int, weight: tuple[int, int]
) -> None:
    known = table(utilizations)
    for shape, value in utilizations.items():
        assert predict(known, *shape) == Prediction(pytest.approx(floor(shape) / value), "measured")
    found = predict(known, rows, *weight)
    assert floor((rows, *weight)) * (1 - 1e-9) <= found.seconds  # never below the floor
    reached = floor((rows, *weight)) / found.seconds
    assert reached <= max(utilizations.values()) * (1 + 1e-9) or (
        found.origin == "interpolated"  # kept between the times of its neighbours
    )
    assert found.origin in ORIGINS


def test_sizes_that_took_as_long_take_as_long_between_them() -> None:
    for seconds in (8.649442174337306e-05, 1.1e-06, 3e-07):  # whose way through a utilization rounds
        known = EfficiencyTable.of(DEVICE, products({(2, 64, 64): seconds, (5, 64, 64): seconds}))
        assert predict(known, 3, 64, 64).seconds == pytest.approx(seconds, rel=1e-12)


@given(st.lists(st.tuples(SIZES, st.floats(0, 1e-4)), min_size=2, max_size=8, unique_by=lambda one: one[0]), SIZES)
def test_more_rows_take_no_less_time_than_fewer_that_were_measured(steps: list[tuple[int, float]], rows: int) -> None:
    times, seconds = {}, 0.0
    for size, more in sorted(steps):  # times that grow with the rows, none below the floor
        seconds = max(seconds + more, floor((size, 64, 64)))
        times[(size, 64, 64)] = seconds
    known = EfficiencyTable.of(DEVICE, products(times))
    found = predict(known, rows, 64, 64)
    below = [value for (size, _, _), value in times.items() if size <= rows]
    above = [value for (size, _, _), value in times.items() if size >= rows]
    if below and above:
        assert max(below) * (1 - 1e-9) <= found.seconds <= min(above) * (1 + 1e-9)


def test_predictions_add_up_and_are_as_sure_as_the_least_sure() -> None:
    measured, between, guessed = (Prediction(1.0, origin) for origin in ORIGINS)
    assert measured + between == Prediction(2.0, "interpolated")
    assert Prediction.total([measured, guessed, between]) == Prediction(3.0, "analytic")
    assert Prediction.total([]) == Prediction(0.0, "measured")


def test_attention_is_interpolated_over_tokens() -> None:
    seconds = {1024: 1e-3, 4096: 12e-3}
    measured = [("attention", "bfloat16", (2, 8, tokens, 64), value) for tokens, value in seconds.items()]
    known = EfficiencyTable.of(DEVICE, measured)
    found = known.predict("attention", "bfloat16", (2, 8, 2048, 64))
    assert found.origin == "interpolated"
    assert 1e-3 < found.seconds < 12e-3


def test_decode_attention_by_sequences_and_bytes_of_each() -> None:
    # A megabyte takes a microsecond; small ones take longer than that by what begins and ends a kernel.
    known = EfficiencyTable.of(DEVICE, [("decode", "bfloat16", (n, 4, 10**6), n * 1e-6 + 5e-6) for n in (1, 4, 64)])
    assert known.predict("decode", "bfloat16", (4, 4, 10**6)) == Prediction(pytest.approx(9e-6), "measured")
    assert 9e-6 <= known.predict("decode", "bfloat16", (16, 4, 10**6)).seconds <= 69e-6
    # Two heads of 64 over 3 keys, in bf16, four queries each: 2 * 2 FLOPs for each of 4 * 2 * 64 * 3.
    assert KINDS["decode"].cost("bfloat16", (1, 4, 2 * 2 * 64 * 3 * 2)).flops == 4 * 4 * 2 * 64 * 3
    assert set(KINDS) == {"product", "attention", "prompt", "decode", "traffic"}


def test_a_line_is_found_and_says_how_sure_it_is() -> None:
    fitted = FittedTimes.of((work, 3e-6 + 2e-9 * work) for work in (1e3, 1e4, 1e5))
    assert fitted is not None
    assert (fitted.start, fitted.each) == (pytest.approx(3e-6), pytest.approx(2e-9))
    assert fitted.predict(5e4) == Prediction(pytest.approx(103e-6), "interpolated")
    assert fitted.predict(1e6) == Prediction(pytest.approx(2.003e-3), "analytic")
    assert fitted.predict(1).origin == "analytic"


def test_errors_count_by_their_share_of_the_time() -> None:
    """A small call is as important as one a thousand times as long."""
    fitted = FittedTimes.of([(1e3, 10e-6), (1e3, 12e-6), (1e6, 2e-3)])
    assert fitted is not None
    assert 10e-6 < fitted.predict(1e3).seconds < 12e-6


def test_no_call_takes_less_than_no_time() -> None:
    fitted = FittedTimes.of([(1.0, 1.0), (2.0, 4.0)])
    assert fitted is not None
    assert fitted.start == 0
    # Relative errors of each * 1 against 1, and of each * 2 against 4, are least at 1.2.
    assert fitted.each == pytest.approx(1.2)


def test_calls_of_one_size_tell_no_rate() -> None:
    assert FittedTimes.of([(1.0, 1.0), (1.0, 2.0)]) is None
    assert FittedTimes.of([]) is None


def test_calls_are_read_back(tmp_path: Path) -> None:
    decodes: list[Call] = [("decode", "bfloat16", (4, 2, 1000), 2e-6), ("decode", "bfloat16", (1, 2, 1000), 1e-6)]
    norms: list[Call] = [("traffic", "bfloat16", (1000,), 1e-6)]
    path = write("NVIDIA H200", "a benchmark", {"rms_norm": norms, "attention": decodes}, tmp_path)
    assert path == path_of("NVIDIA H200", tmp_path) == tmp_path / "nvidia_h200.json"
    assert read("NVIDIA H200", tmp_path) == {"attention": sorted(decodes), "rms_norm": norms}
    assert read("another", tmp_path) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"calls": [["product", "bfloat16", [1], 1.0]]}', '{"other": []}'])
def test_other_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    path_of("a", tmp_path).write_text(text)
    with pytest.raises(ValueError, match=r"a\.json is no file of measured calls .*; make it anew"):
        read("a", tmp_path)


def test_decode_attention_of_the_h200() -> None:
    calls = read("NVIDIA H200")["decode_attention"]
    table = EfficiencyTable.of(device("h200"), calls)
    for kind, dtype, shape, seconds in calls:
        assert table.predict(kind, dtype, shape).seconds == pytest.approx(seconds)
        # None is above the promised bandwidth, and none takes more than 40 us beyond 4 TB/s.
        nbytes = shape[0] * shape[2]
        assert nbytes / 4.8e12 < seconds < nbytes / 4e12 + 40e-6


def test_prompts_of_the_h200_are_predicted_by_the_others_within_a_twentieth() -> None:
    calls = [
        (KINDS[kind].cost(dtype, shape).flops, took) for kind, dtype, shape, took in read("NVIDIA H200")["attention"]
    ]
    for left_out in calls:
        fitted = FittedTimes.of(call for call in calls if call is not left_out)
        assert fitted is not None
        assert fitted.predict(left_out[0]).seconds == pytest.approx(left_out[1], rel=0.05)


def test_whatever_else_was_measured_of_the_h200_is_beyond_its_roofline() -> None:
    for operation, calls in read("NVIDIA H200").items():
        table = EfficiencyTable.of(device("h200"), calls)
        assert table.columns or operation == "all_reduce"  # over a link, not memory
        for column in (column for of_kind in table.columns.values() for column in of_kind.values()):
            assert all(0 < utilization < 1 for _, utilization in column.points)
