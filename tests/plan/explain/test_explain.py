"""Explanations of runs whose bottleneck was planted: the verdict names it, and promises what its remedy brings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from strata.cost.predict import HOST_SECONDS
from strata.cost.step_model import StepModel
from strata.hardware.roofline import Workload
from strata.hardware.roofline import floor as roofline_floor
from strata.models.folder import folder_or_shape
from strata.plan.explain.explain import explain
from strata.plan.explain.explanation import Explanation
from strata.plan.explain.measurement import (
    DeviceState,
    MeasuredRequest,
    MeasuredStep,
    StepChunk,
    TracedOperations,
    UnpackedProducts,
)
from strata.plan.explain.split import split_steps
from strata.plan.explain.step_fit import StepFit
from strata.plan.explain.waterfalls import of_tail
from strata.plan.explain.what_if import WhatIf
from strata.plan.meta_model import find_config, meta_model
from tests.plan.explain.runs import BETWEEN, DEVICE, FACTS, FIGURES, law, requests, run, wall

EVEN = requests(*((100, 24) for _ in range(16)))


@pytest.fixture(scope="module")
def times() -> StepModel:
    return StepModel(meta_model(find_config(folder_or_shape("builtin")), None, torch.bfloat16), DEVICE)


def launched(times: StepModel) -> StepModel:
    """The same steps as if a host launched them on a GPU."""
    found = StepModel(times.model, times.device)
    found.predictor = replace(found.predictor, launch=HOST_SECONDS)
    return found


def saved(before: float, after: float) -> float:
    return 1 - after / before


def check(found: Explanation, words: str, gain: float) -> None:
    """The verdict says these words, its first remedy saves what it does, and the parts add up."""
    assert words in found.verdict.symptom, found.verdict
    assert found.verdict.remedies[0].gain == pytest.approx(gain, rel=0.25)
    fall = found.waterfall
    assert abs(fall.unexplained) <= 0.02 * fall.measured
    assert 0 < fall.floor <= fall.measured


def test_steps_tell_which_share_of_the_pages_they_have(times: StepModel) -> None:
    """Two prompts of 20 tokens have two pages of 16 each; two tokens an output, the first from the prompt's step."""
    found = explain(run(requests((20, 2), (20, 2)), replace(FACTS, kv_tokens=160)), times)
    assert [step.kv for step in found.steps] == pytest.approx([0.4, 0.4])


SLOW = 50e-3  # of a host between steps, so much that a slow machine's scheduler is far below it
LONG = requests(*((100, 24) for _ in range(15)), (100, 400))
SHARED = requests(*((480, 8) for _ in range(16)), shared=400)


@pytest.mark.parametrize(
    ("asked", "facts", "between", "words", "mended"),
    [
        (EVEN, {}, SLOW, "waits for the host", EVEN),
        (EVEN, {"slots": 2}, BETWEEN, "fewer sequences run at once", EVEN),
        (SHARED, {"caches_prefixes": False}, BETWEEN, "beginnings were computed", SHARED),
        (LONG, {}, BETWEEN, "run on after all others", EVEN),
    ],
    ids=["host loop", "batch cap", "no prefix cache", "one long request"],
)
def test_what_was_planted_is_named(
    asked: tuple[MeasuredRequest, ...],
    facts: dict[str, Any],
    between: float,
    words: str,
    mended: tuple[MeasuredRequest, ...],
    times: StepModel,
) -> None:
    of = replace(FACTS, **facts)
    found = explain(run(asked, of, between=between), times)
    check(found, words, saved(wall(asked, of, between=between), wall(mended)))


def test_a_slow_tokenizer(times: StepModel) -> None:
    measured = run(EVEN)
    slow = replace(measured, wall=measured.wall + 0.5, host={"tokenization": 0.5})
    check(explain(slow, times), "prompts become ids", saved(slow.wall, measured.wall))


def test_other_work_on_the_processors(times: StepModel) -> None:
    def halved(step: MeasuredStep) -> MeasuredStep:
        return replace(step, processor=step.seconds / 2)

    measured = run(EVEN, change=halved)
    ran = math.fsum(step.processor or 0.0 for step in measured.steps) + BETWEEN * len(measured.steps)
    check(explain(replace(measured, processor=ran), times), "other work takes the processors", 0.5)


def test_a_thread_that_waits_a_little_for_others_of_its_step_is_no_contention(times: StepModel) -> None:
    measured = run(EVEN, change=lambda step: replace(step, processor=0.96 * step.seconds))
    ran = math.fsum(step.processor or 0.0 for step in measured.steps) + BETWEEN * len(measured.steps)
    found = explain(replace(measured, processor=ran), times)
    assert "processors" not in found.verdict.symptom
    assert found.waterfall.seconds(layer="system", cause="host") > 0.03 * found.waterfall.measured


def test_a_tiny_pool(times: StepModel) -> None:
    asked = requests(*((100, 200) for _ in range(16)))
    facts = replace(FACTS, kv_tokens=16 * 40)
    measured = run(asked, facts)
    assert measured.preemptions
    found = explain(measured, times)
    check(found, "KV capacity", saved(wall(asked, facts), wall(asked)))
    assert found.waterfall.seconds(cause="preemption") > 0


def test_huge_chunks(times: StepModel) -> None:
    asked = [
        replace(request, due=0.03 * index) for index, request in enumerate(requests(*((900, 20) for _ in range(24))))
    ]
    found = explain(run(asked), times, subject="tail")
    small = explain(run(asked, replace(FACTS, step_tokens=64)), times, subject="tail")
    check(found, "tokens wait for the prompts of others", saved(found.waterfall.measured, small.waterfall.measured))
    assert found.verdict.remedies[0].option == "--max-num-batched-tokens"


def test_more_requests_than_one_engine_answers(times: StepModel) -> None:
    asked = [replace(one, due=2e-3 * n) for n, one in enumerate(requests(*((200, 40) for _ in range(60))))]
    measured = run(asked, replace(FACTS, slots=8))
    found = explain(measured, times, subject="request")
    assert found.waterfall.seconds(cause="queueing") > found.waterfall.measured / 2
    latencies = [one.times[-1] - one.due for one in measured.requests]
    assert found.waterfall.measured == pytest.approx(math.fsum(latencies) / len(latencies))
    assert abs(found.waterfall.unexplained) < 1e-9


def test_waits_for_a_request_are_no_time_of_the_host() -> None:
    """A request a second, each of them alone: the replay has the latencies that were measured."""
    asked = [replace(one, due=1.0 * n) for n, one in enumerate(requests(*((100, 8) for _ in range(4))))]
    measured = run(asked)
    latencies = [one.times[-1] - one.due for one in measured.requests]
    assert max(latencies) < 0.5
    assert WhatIf(measured, "request").base.latencies == pytest.approx(latencies, rel=0.05)


def test_a_wait_begins_where_the_step_before_it_ends(times: StepModel) -> None:
    first, last = 0.1, 0.7
    assert last - (last - first) < first  # rounded
    measured = run(requests((20, 2)))
    steps = [
        replace(step, begin=begin, end=end)
        for step, (begin, end) in zip(measured.steps, [(0.0, first), (first, last)], strict=True)
    ]
    timed = replace(measured, steps=tuple(steps), requests=(replace(measured.requests[0], times=(first, last)),))
    fall = of_tail(timed, times).waterfall
    assert fall.measured == pytest.approx(last - first)
    assert fall.seconds(layer="system") == pytest.approx(0.0, abs=1e-9), "the prompt's step is none of the wait"


@pytest.mark.parametrize(("shape", "cause"), [((1000, 1), "compute"), ((10, 100), "memory"), ((300, 100), "memory")])
def test_a_run_near_its_floor_says_what_the_floor_is(times: StepModel, shape: tuple[int, int], cause: str) -> None:
    near = run(
        requests(shape),
        seconds=lambda work: 1.05 * times.floor(work).seconds,
        between=0.0,
        change=lambda step: replace(step, processor=step.seconds),
    )
    found = explain(replace(near, processor=near.wall), times).verdict
    assert "near the floor" in found.symptom
    assert found.cause == cause


@pytest.mark.parametrize(("shape", "bound"), [((900, 1), "compute"), ((900, 8), "compute"), ((900, 100), "memory")])
def test_what_bounds_an_operation_is_what_sets_most_of_its_floor(
    times: StepModel, shape: tuple[int, int], bound: str
) -> None:
    """One long prompt computes; each token behind it reads the weights. Both are counted as often as they ran."""
    ran = run(requests(shape), seconds=lambda work: 2 * times.seconds(work) + 1e-3)
    floors = {"compute": 0.0, "memory": 0.0}
    for step in ran.steps:
        for node in times.model.step(step.workload).model:
            if node.operation == "linear":
                least = roofline_floor(node.cost, DEVICE, "bfloat16")
                floors[least.bound] += least.seconds
    assert max(floors, key=floors.__getitem__) == bound
    found = explain(ran, times)
    linear = next(one for one in found.operations if one.name == "linear")
    assert linear.bound == bound
    assert linear.floor == pytest.approx(sum(floors.values()), rel=0.05)
    part = next(part for part in found.waterfall.parts if part.name == "linear over its floor")
    assert part.cause == bound


@pytest.mark.parametrize(("count", "words"), [(1, []), (2, ["twice the requests at once"])])
def test_a_workload_of_one_request_has_no_others_to_run_at_once(times: StepModel, count: int, words: list[str]) -> None:
    ran = run(requests(*((100, 24) for _ in range(count))), seconds=lambda work: 50 * times.floor(work).seconds + 1e-2)
    assert [one.what for one in explain(ran, times).verdict.remedies] == words


def test_a_dtype_that_is_wider_than_asked(times: StepModel) -> None:
    wide_pool = replace(times.model.sizes.pool, dtype=torch.float32)
    wide = StepModel(times.model.of_sizes(pool=wide_pool), DEVICE)
    facts = replace(FACTS, dtype="float32")
    measured = run(EVEN, facts, seconds=lambda workload: wide.seconds(workload))
    after = wall(EVEN, seconds=lambda workload: times.seconds(workload))
    found = explain(measured, wide, wanted=times)
    check(found, "float32, bfloat16 was asked", saved(measured.wall, after))


@pytest.mark.parametrize("asked", [True, False])
def test_packed_weights_that_are_unpacked_in_every_call(times: StepModel, asked: bool) -> None:
    """Products take 90 of the 100 ms of a step, and would take 20 of plain weights."""
    shares = dict.fromkeys(("decode", "prompt"), TracedOperations({"linear": 0.09, "attention": 0.01}, 0.1))
    slow = run(EVEN, seconds=lambda workload: 0.1, traced=shares)
    found = explain(replace(slow, unpacked=UnpackedProducts("int4", "linear", 0.02 * len(slow.steps), asked)), times)
    after = wall(EVEN, seconds=lambda workload: 0.1 - 0.09 + 0.02)
    check(found, "linear unpacks weights in int4 in every call", saved(slow.wall, after))
    assert ("--quantization" in found.verdict.remedies[0].option) == asked
    assert ("checkpoint" in found.verdict.remedies[0].what) != asked


def test_plain_products_that_are_as_slow_are_no_remedy(times: StepModel) -> None:
    shares = dict.fromkeys(("decode", "prompt"), TracedOperations({"linear": 0.09, "attention": 0.01}, 0.1))
    slow = run(EVEN, seconds=lambda workload: 0.1, traced=shares)
    found = explain(replace(slow, unpacked=UnpackedProducts("int4", "linear", 0.1 * len(slow.steps), True)), times)
    assert not any("unpack" in one.what for one in found.verdict.remedies)


def test_a_graph_that_is_not_fused(times: StepModel) -> None:
    expected = {"linear": 21, "attention": 5}
    facts = replace(FACTS, operations={"linear": 36, "attention": 5}, expected=expected)
    each = 1e-4
    share = {"decode": TracedOperations({"linear": 36 * each, "attention": 20 * each}, 56 * each)}
    measured = run(EVEN, facts, seconds=lambda workload: 56 * each, traced=share | {"prompt": share["decode"]})
    gain = saved(wall(EVEN, seconds=lambda workload: 56 * each), wall(EVEN, seconds=lambda workload: 41 * each))
    check(explain(measured, times), "run one by one", gain)


def test_launches_by_the_host(times: StepModel) -> None:
    measured = run(EVEN, change=lambda step: replace(step, busy=step.seconds / 3, eager=True))
    found = explain(measured, times)
    stepping = measured.stepping / measured.wall
    check(found, "launches by the host", stepping * 2 / 3)
    assert found.verdict.layer == "graph"


def test_eager_steps_of_a_gpu_wait_for_launches(times: StepModel) -> None:
    """Where nobody saw when the device worked: what a step exceeds its work by is launches, if those are longer."""
    measured = run(EVEN, seconds=lambda workload: 0.5, change=lambda step: replace(step, eager=True))
    found = explain(measured, launched(times))
    check(found, "launches by the host", measured.stepping / measured.wall)  # the work is next to nothing
    busy = StepModel(
        times.model, replace(DEVICE, figures=tuple(replace(one, value=one.value / 1e3) for one in FIGURES))
    )
    measured = run(
        EVEN, seconds=lambda workload: 1.2 * busy.seconds(workload), change=lambda step: replace(step, eager=True)
    )
    found = explain(measured, launched(busy))
    assert "launches" not in found.verdict.symptom


def test_a_host_that_launches_faster_than_predicted_leaves_the_work_whole(times: StepModel) -> None:
    decodes = tuple(StepChunk(sequence, 100, 1, 1) for sequence in range(16))
    nodes = times.model.step(MeasuredStep(0.0, 1.0, decodes).workload)
    own = (*nodes.inputs, *nodes.model, *nodes.draw)
    work = math.fsum(times.predictor.node(node, MeasuredStep(0.0, 1.0, decodes).workload).seconds for node in own)
    took = (work + launched(times).predictor.launches(len(own))) / 2
    assert work < took
    split = split_steps(replace(run(EVEN), steps=(MeasuredStep(0.0, took, decodes, eager=True),)), launched(times))
    assert math.fsum(one.seconds for one in split.operations) == pytest.approx(work)


def test_steps_whose_launches_lost_the_processor(times: StepModel) -> None:
    """Of a GPU: the step is longer by what its launch was delayed, but where it had enough to do meanwhile."""
    whole = wall(EVEN, seconds=lambda workload: times.seconds(workload))
    measured = run(
        EVEN,
        seconds=lambda workload: 2 * times.seconds(workload),
        change=lambda step: replace(step, delayed=0.5 * step.seconds),
    )
    check(explain(measured, times), "takes the processors", saved(measured.wall, whole))
    hidden = run(EVEN, seconds=times.seconds, change=lambda step: replace(step, delayed=0.5 * step.seconds))
    assert "processors" not in explain(hidden, times).verdict.symptom


def test_a_launch_that_waits_for_its_compiler_lost_no_processor(times: StepModel) -> None:
    measured = run(EVEN, seconds=times.seconds)
    late = replace(measured.steps[-1], end=measured.steps[-1].end + 0.3, delayed=0.25, compiled=1)
    found = explain(replace(measured, wall=measured.wall + 0.3, steps=(*measured.steps[:-1], late)), times)
    parts = {part.name: part.seconds for part in found.waterfall.parts}
    assert parts["compilation"] == pytest.approx(0.3, rel=0.02)
    assert "processors taken by other work" not in parts


def test_another_process_on_the_device(times: StepModel) -> None:
    measured = run(EVEN, seconds=lambda workload: 3 * times.seconds(workload))
    found = explain(replace(measured, device=DeviceState(others=("9.0 GiB in use",))), times)
    alone = wall(EVEN, seconds=lambda workload: times.seconds(workload))
    check(found, "the device is shared", saved(measured.wall, alone))


def test_clocks_that_are_held_down(times: StepModel) -> None:
    measured = run(EVEN, seconds=lambda workload: 1.3 * times.seconds(workload))
    found = explain(replace(measured, device=DeviceState(slowed_by=("power limit",))), times)
    assert found.verdict.cause == "power"


def test_a_run_without_steps_is_refused(times: StepModel) -> None:
    with pytest.raises(ValueError, match="no step"):
        explain(replace(run(EVEN), steps=()), times)


def test_steps_that_did_not_run_are_near_the_law() -> None:
    fit = StepFit.of(run(EVEN).steps)
    for workload in (Workload((1,) * 12, (110,) * 12), Workload((700,), (700,))):
        assert fit.seconds(workload) == pytest.approx(law(workload), rel=0.25)
