"""The floors of a plan's steps by hand, and what is said of objectives below them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strata.plan.meta_model import find_config
from strata.plan.search.layout import ServingLayout
from strata.plan.search.machine import Machine
from strata.plan.search.precision import AS_CHECKPOINT, IN_FEWER_BITS, Precision
from strata.plan.search.search import Question, Search, below_floors
from strata.plan.search.traffic import Objectives, Traffic

PROMPT = 777
TRAFFIC = Traffic.of(PROMPT, 200)


def asked(machine: Machine, model: str, devices: int, objectives: Objectives, layers: int = 4) -> Search:
    config = find_config(model).with_layers(range(layers))
    return Search(Question(model, config, torch.bfloat16, machine, devices, TRAFFIC, objectives))


def test_8b_by_hand(machine: Machine) -> None:
    """A token reads every matrix once, at 4.28 TB/s; a prompt of 777 multiplies by them at 800 TFLOP/s, and the head by
    its last token."""
    search = asked(machine, "8B", 4, Objectives(1.0, 1.0))
    layers, head = 4 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336), 128256 * 4096
    for layout, ranks, rows in ((ServingLayout(), 1, PROMPT), (ServingLayout(4), 4, PROMPT)):
        table = search.table(layout, AS_CHECKPOINT)
        token, prompt = (table.price(*step).bounds for step in ((1, 0), (0, PROMPT)))
        assert token.memory == pytest.approx(2 * (layers + head) / ranks / 4.28e12, rel=0.01)
        assert prompt.compute == pytest.approx(2 * (layers * rows + head) / ranks / 800e12, rel=0.02)
    packed = search.table(ServingLayout(), Precision("fp8")).price(1, 0).bounds.memory
    assert packed == pytest.approx((layers + 2 * head) / 4.28e12, rel=0.02)


def test_both_impossible_objectives_are_named(machine: Machine) -> None:
    search = asked(machine, "0.6B", 1, Objectives(1.0, 1.0))
    table = search.table(ServingLayout(), IN_FEWER_BITS[-1])
    ttft, fastest = min(
        (search.table(ServingLayout(), one).price(0, PROMPT).bounds.seconds, one.name) for one in search.precisions
    )
    tpot = table.price(1, 0).bounds.seconds
    between = replace(search.question, objectives=Objectives(0.99 * ttft, 0.99 * tpot))
    said = r"^--ttft \S+ and --tpot \S+ are below the floors of 0.6B on 1 x h200, "
    both = rf"{ttft * 1e3:.3g} ms \({fastest}\) and {tpot * 1e3:.3g} ms \({IN_FEWER_BITS[-1].name}\): "
    with pytest.raises(ValueError, match=said + both):
        Search(between).run()
    for objectives in (Objectives(1e-5, 1e-6), Objectives(1e-5), Objectives(None, 1e-6)):
        with pytest.raises(ValueError, match="below the floor") as raised:
            Search(replace(search.question, objectives=objectives)).run()
        assert ("--ttft 0.01" in str(raised.value)) == (objectives.ttft is not None)
        assert ("--tpot 0.001" in str(raised.value)) == (objectives.tpot is not None)


def test_what_is_above_its_floor_is_not_named() -> None:
    floors = {"ttft": (0.02, AS_CHECKPOINT), "tpot": (0.001, Precision("fp8", "fp8"))}
    assert below_floors(Objectives(0.02, 0.001), floors, "here") is None
    assert below_floors(Objectives(None, None), floors, "here") is None
    said = below_floors(Objectives(0.03, 0.0005), floors, "here")
    assert said is not None
    assert said.startswith("--tpot 0.5 is below the floor of here, 1 ms (fp8 weights, fp8 KV): ")
