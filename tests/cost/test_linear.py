"""The linear form that the scheduler asks, against the exact model of the same program."""

from __future__ import annotations

import numpy as np
import pytest

from strata.cost.linear import linear
from strata.cost.step_model import StepModel
from strata.cost.step_times import StepTimes
from strata.hardware.roofline import Workload
from strata.hardware.specs import device
from strata.parallel.serving_shard import RankShard
from strata.plan.meta_model import find_config, meta_model

H200 = device("h200")
Step = tuple[int, int, tuple[tuple[int, int], ...]]
"""Decodes, tokens of each with those before, and prompts: the first token and how many."""
# None of them is one that is fitted.
DECODES: list[Step] = [(count, keys, ()) for count in (4, 32, 64, 200) for keys in (300, 1500, 3000)]
MIXED: list[Step] = [
    (count, keys, ((start, size - count),))
    for count in (8, 64)
    for keys in (500, 2000)
    for size in (512, 2048)
    for start in (0, 1024, 4096)
]
FEW: list[Step] = [(count, keys, ()) for count in (1, 2, 4, 8) for keys in (300, 3000)]
PROMPTS: list[Step] = [(64, 800, ((0, 448),) * count) for count in (1, 2, 4)]


def predicted(times: StepTimes, step: Step) -> float:
    decodes, keys, prompts = step
    others = times.decodes(decodes, decodes * keys) + sum(times.chunk(*prompt) for prompt in prompts)
    tokens = decodes + sum(count for _, count in prompts)
    return times.total(tokens, others) if prompts else times.undivided(tokens, others)


@pytest.mark.parametrize(
    ("name", "options", "median", "nine_tenths"),
    [
        ("0.6B", {}, 0.10, 0.20),
        ("8B", {}, 0.05, 0.10),
        ("8B", {"quantization": "fp8"}, 0.05, 0.10),
        ("8B", {"quantization": "int4"}, 0.05, 0.12),
        ("30B-A3B", {}, 0.08, 0.20),
        ("gpt-oss-20b", {}, 0.07, 0.12),
    ],
)
def test_steps_that_were_not_fitted_are_near_the_exact_model(
    name: str, options: dict[str, str], median: float, nine_tenths: float
) -> None:
    model = meta_model(find_config(name), H200, **options)
    exact = StepModel(model, H200)
    sizes = model.sizes
    times = linear(exact, sizes.max_tokens, sizes.max_sequences, sizes.max_length, captured=8192)
    errors = []
    for step in (*DECODES, *MIXED, *PROMPTS):
        decodes, keys, prompts = step
        new, behind = tuple(count for _, count in prompts), tuple(start + count for start, count in prompts)
        took = exact.on_device(Workload((1,) * decodes + new, (keys,) * decodes + behind))
        errors.append(abs(predicted(times, step) / took - 1))
    assert np.quantile(errors, 0.5) < median
    assert np.quantile(errors, 0.9) < nine_tenths


@pytest.mark.parametrize(("name", "most"), [("8B", 0.15), ("30B-A3B", 0.25), ("gpt-oss-20b", 0.15)])
def test_few_decodes_of_mixtures_read_few_experts(name: str, most: float) -> None:
    model = meta_model(find_config(name), H200)
    exact, sizes = StepModel(model, H200), model.sizes
    times = linear(exact, sizes.max_tokens, sizes.max_sequences, sizes.max_length, captured=8192)
    for step in FEW:
        took = exact.on_device(Workload((1,) * step[0], (step[1],) * step[0]))
        assert predicted(times, step) == pytest.approx(took, rel=most)


def test_a_stage_sends_its_hidden_states_to_the_next() -> None:
    config = find_config("8B")
    first, last = (
        StepModel(meta_model(config, H200, shard=RankShard.of(config, 1, 0, stages=2, stage=stage)), H200)
        for stage in range(2)
    )
    step = Workload((2048,), (2048,))
    sent = 2048 * 4096 * 2  # of so many tokens elements of two bytes
    assert first.link is not None
    assert first.floor(step).communication == pytest.approx(first.link.min_seconds(1, sent))
    assert last.floor(step).communication == 0
    (message,) = (node for node in first.model.step(step).timed if node.operation == "send_next")
    assert first.predictor.node(message, step).seconds > sent / first.link.bandwidth / 2
    times = linear(first, 8192, 256, 4096)
    took = first.on_device(step)
    assert predicted(times, (0, 0, ((0, 2048),))) == pytest.approx(took, rel=0.05)


def test_an_engine_of_few_tokens_and_one_sequence_has_times_too() -> None:
    model = meta_model(find_config("0.6B").with_layers((0, 1)), H200)
    exact = StepModel(model, H200)
    times = linear(exact, tokens=16, sequences=1, longest=4096, captured=16)
    for step in ((1, 256, ()), (1, 1024, ((0, 15),))):
        decodes, keys, prompts = step
        new = tuple(count for _, count in prompts)
        took = exact.on_device(Workload((1,) * decodes + new, (keys,) * decodes + new))
        assert predicted(times, step) == pytest.approx(took, rel=0.2)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_model_len": 256}, [(64, 200, ((0, 255),) * 15), (0, 0, ((0, 255),) * 16)]),
        ({"max_num_batched_tokens": 512}, [(32, 1000, ((2048, 480),)), (8, 1000, ((0, 256),))]),
    ],
)
def test_limits_of_an_engine_limit_what_is_fitted(options: dict[str, int], steps: list[Step]) -> None:
    model = meta_model(find_config("8B"), H200, **options)
    exact, sizes = StepModel(model, H200), model.sizes
    times = linear(exact, sizes.max_tokens, sizes.max_sequences, sizes.max_length, captured=8192)
    for step in steps:
        decodes, keys, prompts = step
        new, behind = tuple(count for _, count in prompts), tuple(start + count for start, count in prompts)
        took = exact.on_device(Workload((1,) * decodes + new, (keys,) * decodes + behind))
        assert predicted(times, step) == pytest.approx(took, rel=0.2)
