"""Floors of steps, and what is found to hold an engine back."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from strata.cache.pages import SharedKeys
from strata.cost.linear import linear_floor
from strata.cost.step_costs import StepCosts
from strata.cost.step_times import ShardingTimes, StepTimes
from strata.engine.loop import StepTiming
from strata.engine.plan import Chunk, Draw, StepPlan
from strata.engine.program.meta_model import MetaModel
from strata.engine.scheduling.config import Waiting
from strata.engine.step_cost import step_times
from strata.engine.watch.step_shares import StepLook, StepShares
from strata.engine.watch.step_window import Standings, StepWindow
from strata.engine.watch.verdict import FINDINGS, Shares, standing
from strata.hardware.roofline import Floor, Workload, floor
from strata.hardware.specs import device
from strata.plan.meta_model import find_config, meta_model

H200 = device("h200")


@pytest.fixture(scope="module")
def model() -> MetaModel:
    return meta_model(find_config("0.6B"), H200, torch.bfloat16)


@pytest.fixture(scope="module")
def costs(model: MetaModel) -> StepCosts:
    return model.step_costs


@pytest.fixture(scope="module")
def times(model: MetaModel) -> StepTimes:
    found = step_times(model, H200.product, 8192)
    assert found is not None
    return found


def plan(decodes: list[int], prompts: list[tuple[int, int]]) -> StepPlan:
    """decodes: tokens before each. prompts: (first token, tokens) of each."""
    chunks = [Chunk(at, at, start, 1, (Draw(at, at),), 0, ()) for at, start in enumerate(decodes)]
    chunks += [Chunk(100 + at, 100 + at, start, count, (), 0, ()) for at, (start, count) in enumerate(prompts)]
    return StepPlan((), (), tuple(chunks), (), len(decodes) + sum(count for _, count in prompts))


STEPS = [([0], []), ([500, 4000, 77], []), ([], [(0, 2048)]), ([900] * 64, [(0, 512), (1024, 300)])]


@pytest.mark.parametrize(("decodes", "prompts"), STEPS)
def test_the_floor_of_a_step_is_that_of_the_roofline(
    costs: StepCosts, times: StepTimes, decodes: list[int], prompts: list[tuple[int, int]]
) -> None:
    new = (1,) * len(decodes) + tuple(count for _, count in prompts)
    total = tuple(start + 1 for start in decodes) + tuple(start + count for start, count in prompts)
    wanted = floor(costs.step(Workload(new, total), len(new)), H200, "bfloat16")
    shares = StepShares(times, linear_floor(costs, H200, "bfloat16"))
    look = shares.look(plan(decodes, prompts))
    assert look.floor is not None
    assert look.floor.compute == pytest.approx(wanted.compute, rel=1e-6)
    assert look.floor.memory == pytest.approx(wanted.memory, rel=1e-6)
    assert look.predicted is not None
    assert look.floor.seconds < look.predicted < 5 * look.floor.seconds


def test_keys_that_sequences_share_are_read_once_at_least(costs: StepCosts) -> None:
    """0.6B: 28 layers of 8 heads of 128 keys and as many values, in 2 bytes."""
    shares = StepShares(None, linear_floor(costs, H200, "bfloat16"))
    alone = plan([2000] * 64, [(1024, 64)])
    shared = msgspec.structs.replace(alone, shared=SharedKeys(1024, 64 * 1024))
    own, less = shares.look(alone).floor, shares.look(shared).floor
    assert own is not None
    assert less is not None
    nbytes = 64 * 1024 * 28 * 2 * 8 * 128 * 2
    assert own.memory - less.memory == pytest.approx(nbytes / H200.ceiling("bandwidth").value, rel=1e-6)
    assert own.compute == less.compute


def test_the_share_of_prompts_is_what_the_step_would_be_shorter_without(times: StepTimes) -> None:
    shares = StepShares(times)
    mixed, alone = shares.look(plan([900] * 64, [(0, 512)])), shares.look(plan([900] * 64, []))
    assert mixed.predicted is not None
    assert alone.predicted is not None
    assert mixed.prompts == pytest.approx(1 - alone.predicted / mixed.predicted)
    assert (alone.prompts, shares.look(plan([], [(0, 512)])).prompts) == (0.0, 1.0)
    assert StepShares().look(plan([9] * 3, [(0, 9)])).prompts == pytest.approx(9 / 12)


def test_ranks_divide_no_step_of_decodes_alone(times: StepTimes) -> None:
    division = ShardingTimes(2, 256, 1e-6, 0.0, 8192)
    one, two = StepShares(times), StepShares(replace(times, division=division))
    decodes, mixed = plan([900] * 512, []), plan([900] * 512, [(0, 2048)])
    assert two.look(decodes) == one.look(decodes)
    alone, divided, whole = (look.predicted for look in (one.look(decodes), two.look(mixed), one.look(mixed)))
    assert alone is not None
    assert divided is not None
    assert whole is not None
    assert divided < 0.8 * whole
    assert two.look(mixed).prompts == pytest.approx(max(0.0, 1 - alone / divided))


def test_what_is_found() -> None:
    cases = {
        "host gaps": Shares(gap=0.3, floor=0.5, held={"slot": 0.9}),
        "grammar masks": Shares(gap=0.1, masks=0.2),
        "launches": Shares(launches=0.4, floor=0.3),
        "recomputation": Shares(recomputed=0.2, held={"pages": 0.9}),
        "compilation": Shares(compiled=1, gap=0.2),
        "KV pages": Shares(held={"pages": 0.8}, floor=0.7),
        "slots": Shares(held={"slot": 0.8}),
        "prompts": Shares(held={"step_full": 0.6}, floor=0.5),
        "slow steps": Shares(floor=0.4, held={"slot": 0.4}),
        "near the floor": Shares(floor=0.7, gap=0.09),
        "working": Shares(),
    }
    assert set(cases) == set(FINDINGS)
    for finding, shares in cases.items():
        assert standing(shares).finding == finding
    assert standing(Shares(floor=0.7, bound="compute")).cause == "compute"


def test_the_window_tells_of_the_last_seconds_alone() -> None:
    window = StepWindow(captures=True, seconds=10)

    def step(ended: float, gap: float, *, captured: bool = True, late: bool = False) -> None:
        timing = StepTiming(plan([5], []), (Waiting(),), 0.0, 0.0, ended, captured=captured, late=late)
        window.step(timing, StepLook(0.0, Floor(0.0, 0.02), 0.03), gap, 0.04, 0.0)

    assert window.standings(0.0, 0) == Standings()
    for at in range(50):
        step(1.0 + at / 10, gap=0.06)
    found = window.standings(6.0, 0)
    assert found.floor == pytest.approx(0.2)
    assert found.predicted == pytest.approx(0.75)
    assert found.gap == pytest.approx(0.6)
    assert found.verdict is not None
    assert found.verdict.finding == "host gaps"
    for at in range(50):
        step(20.0 + at / 10, gap=0.0, captured=False, late=True)
    found = window.standings(25.0, 0)
    assert found.gap == 0.0
    assert found.verdict is not None
    assert found.verdict.finding == "launches"
    assert window.standings(40.0, 1) == Standings()
    for at in range(50):  # prompts that keep the device busy while the host launches the next
        step(50.0 + at / 10, gap=0.0, captured=False)
    found = window.standings(55.0, 1)
    assert found.verdict is not None
    assert found.verdict.finding == "slow steps"


def test_kernels_compiled_meanwhile_are_told() -> None:
    window = StepWindow(captures=False)
    window.standings(0.0, 3)
    for ended in (1.0, 2.0):
        timing = StepTiming(plan([5], []), (Waiting(),), 0.0, 0.0, ended)
        window.step(timing, StepLook(), 0.0, 1.0, 0.0)
    assert window.standings(3.0, 4).verdict == ("compilation", "kernel", "compilation")
    assert window.standings(9.0, 4).verdict == ("compilation", "kernel", "compilation")
    assert window.standings(11.5, 4).verdict == ("working", "system", "scheduling")
