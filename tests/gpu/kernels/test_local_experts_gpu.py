"""A rank's part of the experts on CUDA: against float64, in recorded graphs, and without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.moe.calls import LocalExpertsCall
from strata.kernels.moe.count import count_choices
from strata.kernels.moe.experts import by_library, by_tiles, local_experts
from strata.kernels.moe.local_order import local_numbers, local_order

pytestmark = pytest.mark.gpu

COUNT, SLOTS, PERIOD = 16, 20, 6
# Experts 0 to 3 have a second copy, in the last slots.
COPIES = [[expert, 16 + expert] if expert < 4 else [expert] for expert in range(COUNT)]


def table() -> Tensor:
    rows = [[slots[turn % len(slots)] for turn in range(PERIOD)] for slots in COPIES]
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def inputs(tokens: int, per_token: int, dtype: torch.dtype, hidden: int, width: int) -> list[Tensor]:
    chosen = torch.rand(tokens, COUNT, device="cuda").argsort(1)[:, :per_token].contiguous()
    shapes = ((tokens, hidden), (COUNT, 2 * width, hidden), (COUNT, hidden, width))
    x, gate_up, down = (torch.randn(shape, device="cuda") for shape in shapes)
    return [
        x.to(dtype),
        torch.rand(chosen.shape, device="cuda"),
        chosen,
        (gate_up / 16).to(dtype),
        (down / 16).to(dtype),
    ]


def part(given: list[Tensor], first: int, held: int, placement: Tensor | None) -> list[Tensor | int]:
    x, weights, chosen, gate_up, down = given
    own = torch.tensor([slot % COUNT for slot in range(first, first + held)], device="cuda")
    slots = COUNT if placement is None else SLOTS
    return [x, weights, chosen, gate_up[own], down[own], first, slots, *(() if placement is None else (placement,))]


def near_float64(run: Callable[..., Tensor], given: list[Tensor | int], bound: float) -> None:
    exact = [one.double() if isinstance(one, Tensor) and one.is_floating_point() else one for one in given]
    found, wanted = run(LocalExpertsCall(*given)), local_experts.reference(*exact)
    assert found.dtype == given[0].dtype
    assert torch.equal(found.any(1) | ~found.isfinite().all(1), wanted.any(1))
    assert (found.double() - wanted).norm() <= bound * wanted.norm()


BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("hidden", "width"), [(256, 128), (100, 37), (512, 192)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 64, 129, 1000, 3000])
@pytest.mark.parametrize("placed", [False, True])
def test_tiles_are_near_float64(placed: bool, tokens: int, hidden: int, width: int, dtype: torch.dtype) -> None:
    given = inputs(tokens, 4, dtype, hidden, width)
    for first, held in ((0, 4), (3, 9), (15, 1)) if not placed else ((0, 7), (13, 7)):
        near_float64(by_tiles, part(given, first, held, table() if placed else None), BOUNDS[dtype])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", [1, 64, 3000])
@pytest.mark.parametrize("placed", [False, True])
def test_the_library_is_near_float64(placed: bool, tokens: int) -> None:
    given = inputs(tokens, 4, torch.bfloat16, 256, 128)
    for first, held in ((0, 4), (3, 9)) if not placed else ((0, 7), (13, 7)):
        near_float64(by_library, part(given, first, held, table() if placed else None), 1e-2)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 33, 100, 1024])
def test_choices_are_sorted_by_expert(tokens: int, placed: bool, padded: bool) -> None:
    chosen = torch.rand(tokens, COUNT, device="cuda").argsort(1)[:, :8].contiguous()
    assert chosen.numel() <= thresholds_of(MEASURED).sorted_choices
    for first, held in ((0, 16), (3, 9), (15, 1)):
        placement = table() if placed else None
        mapping = torch.randint(-1, 2, (tokens,), device="cuda", dtype=torch.int32) if padded else None
        order, numbers = (make(chosen, first, held, placement, mapping) for make in (local_order, local_numbers))
        wanted = torch.cat([(numbers.flatten() == number).nonzero().flatten() for number in range(held)])
        counts = torch.stack([(numbers == number).sum() for number in range(held)])
        assert torch.equal(order.ends, counts.cumsum(0).int())
        assert torch.equal(order.source[: len(wanted)], wanted)
        places = torch.full_like(numbers.flatten(), -1, dtype=torch.int64)
        places[wanted] = torch.arange(len(wanted), device="cuda")
        assert torch.equal(order.inverse.flatten(), places)


def test_nobody_chose_an_expert_of_this_rank() -> None:
    given = inputs(33, 4, torch.bfloat16, 256, 128)
    given[2] = given[2] % 8
    own = part(given, 12, 4, None)
    for run in (by_tiles, by_library):
        assert not run(LocalExpertsCall(*own)).any()


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 33), (torch.float16, 3000), (torch.bfloat16, 3000)])
def test_a_recorded_part_follows_its_inputs(dtype: torch.dtype, tokens: int) -> None:
    given = inputs(tokens, 4, dtype, 256, 128)
    own = part(given, 13, 7, table())
    bound = local_experts.bind("cuda")
    with torch.inference_mode():
        bound(*own)
        torch.cuda.set_sync_debug_mode("error")
        try:
            bound(*own)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = bound(*own)
        for shift in (0, 1, 5):
            given[0].copy_(given[0].roll(shift, 0))
            given[2].copy_((given[2] + shift) % COUNT)
            graph.replay()
            exact = [one.double() if isinstance(one, Tensor) and one.is_floating_point() else one for one in own]
            wanted = local_experts.reference(*exact)
            assert (found.double() - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_choices_are_counted_without_padding(tokens: int) -> None:
    chosen = torch.rand(tokens, COUNT, device="cuda").argsort(1)[:, :4].contiguous()
    slot_mapping = torch.arange(tokens, dtype=torch.int32, device="cuda")
    slot_mapping[tokens // 2 :] = -1
    totals = torch.ones(3, COUNT, dtype=torch.int64, device="cuda")
    bound = count_choices.bind("cuda", deterministic=True)
    assert bound.choose(chosen, slot_mapping, totals, 1).name == "triton"
    assert bound(chosen, slot_mapping, totals, 1) is chosen
    wanted = 1 + chosen[: tokens // 2].flatten().bincount(minlength=COUNT)
    assert torch.equal(totals, torch.stack([torch.ones_like(wanted), wanted, torch.ones_like(wanted)]))
