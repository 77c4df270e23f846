"""Seconds of steps that are kept by kind of step, against all nodes of each step."""

from __future__ import annotations

import random

import pytest
import torch

from strata.cost.predict import HOST_SECONDS
from strata.cost.step_model import StepModel
from strata.hardware.figures import Device, Figure
from strata.hardware.roofline import Workload
from strata.models.folder import folder_or_shape
from strata.plan.meta_model import find_config, meta_model


def workload(decodes: int, *prompts: tuple[int, int]) -> Workload:
    """Decodes over caches of random lengths, then prompts: (new tokens, cached tokens)."""
    held = random.Random(decodes)
    new = (1,) * decodes + tuple(tokens for tokens, _ in prompts)
    total = tuple(held.randint(1, 4000) for _ in range(decodes)) + tuple(tokens + cached for tokens, cached in prompts)
    return Workload(new, total)


RECORDED = [
    workload(1),
    workload(20),
    workload(256),
    workload(0, (512, 0)),
    workload(0, (500, 1000), (77, 0)),
    workload(30, (700, 0), (20, 640)),
]


@pytest.mark.parametrize("step", RECORDED, ids=lambda step: f"{len(step.new)} sequences, {step.tokens} tokens")
def test_recorded_steps_are_kept_whole(step: Workload, times: StepModel) -> None:
    assert times.model.choose(step).size is not None
    assert times.seconds(step) == pytest.approx(times.predict(step).seconds, rel=1e-6)
    assert times.seconds(step) > times.floor(step).seconds


@pytest.mark.parametrize("step", [workload(40, (9001, 0)), workload(0, (20_123, 500)), workload(3, *[(97, 0)] * 200)])
def test_what_no_graph_holds_lies_between_its_neighbours(step: Workload, times: StepModel) -> None:
    assert times.model.choose(step).size is None
    assert times.seconds(step) == pytest.approx(times.predict(step).seconds, rel=0.02)


def test_a_step_of_another_length_asks_for_its_own_attention(times: StepModel) -> None:
    short, long = Workload((1,) * 8, (100,) * 8), Workload((1,) * 8, (3000,) * 8)
    assert times.seconds(long) - times.seconds(short) == pytest.approx(
        times.predict(long).seconds - times.predict(short).seconds, rel=1e-6
    )


def test_a_processor_waits_for_no_launches() -> None:
    """It is the host: a small step takes what its nodes take, however many they are."""
    rates = [Figure("bandwidth", 1e10, "made up", ""), Figure("compute", 1e11, "made up", "", "bfloat16")]
    times = StepModel(meta_model(find_config("0.6B"), None, torch.bfloat16), Device("made-up", "Made up", tuple(rates)))
    step = times.model.step(one := Workload((1,), (20,)))
    nodes = sum(times.predictor.node(node, one).seconds for node in step.timed)
    assert (times.predict(one).seconds, times.seconds(one)) == (pytest.approx(nodes), pytest.approx(nodes))
    assert times.around == 0
    tiny = StepModel(meta_model(find_config(folder_or_shape("builtin")), None, torch.bfloat16), times.device)
    assert tiny.predict(one).seconds < len(tiny.model.step(one).timed) * HOST_SECONDS
