"""Experts on CUDA, all and a rank's part: near float64 with gradients, captured, and without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from strata.kernels.activation.silu_mul import Clamp
from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.linear.linear import wide_linear
from strata.kernels.moe.calls import ExpertsCall, LocalExpertsCall
from strata.kernels.moe.combine import combine, summed
from strata.kernels.moe.count import count_choices
from strata.kernels.moe.experts import biased_experts, by_library, by_tiles, experts, local_experts
from strata.kernels.moe.local_order import local_numbers, local_order
from strata.kernels.moe.route import route
from tests.gpu.tensors import assert_within, captured, no_waiting, widened

pytestmark = pytest.mark.gpu

BOUNDS = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-5}
of_any_dtype = pytest.mark.parametrize(("dtype", "bound"), BOUNDS.items(), ids=str)


def inputs(tokens: int, count: int = 8, hidden: int = 256, width: int = 128) -> list[Tensor]:
    """The last expert is never chosen."""
    torch.manual_seed(tokens)
    logits = torch.randn(tokens, count, device="cuda")
    logits[:, -1] = -100
    weights, chosen = route(logits, None, 2, True)
    matrices = torch.randn(count, 2 * width, hidden, device="cuda"), torch.randn(count, hidden, width, device="cuda")
    floats = [torch.randn(tokens, hidden, device="cuda"), *(matrix / 16 for matrix in matrices)]
    x, gate_up, down = (one.to(torch.bfloat16) for one in floats)
    return [x, weights, chosen, gate_up, down]


def with_gradients(run: object, given: list[Tensor], slope: Tensor) -> list[Tensor]:
    leaves = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in given]
    assert callable(run)
    result = run(*leaves)
    result.backward(slope.to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
def test_grouped_products_are_near_float64(tokens: int) -> None:
    given = inputs(tokens)
    exact = widened(given)
    # No random slope: the gradient of a weight is then a sum of 256 terms that may all but cancel.
    slope = experts.reference(*exact).to(torch.bfloat16)
    found, wanted = (
        with_gradients(experts.of_arguments(by_library), given, slope),
        with_gradients(experts.reference, exact, slope),
    )
    assert len(found) == 5
    for mine, other in zip(found, wanted, strict=True):
        assert (mine.double() - other).norm() <= 0.01 * other.norm()
    assert not found[3][-1].any()
    assert not found[4][-1].any()


@pytest.mark.parametrize("tokens", [1, 3, 64, 1000])
def test_grouped_products_of_tokens_with_fewer_experts(tokens: int) -> None:
    x, weights, chosen, gate_up, down = inputs(tokens)
    kept = torch.rand(chosen.shape, device="cuda") < 0.5
    kept[0], kept[-1] = False, True
    given = [x, weights, chosen.int().where(kept, -1), gate_up, down]
    filled = int(kept.sum())
    exact = widened(given)
    slope = experts.reference(*exact, filled).to(torch.bfloat16)
    found = with_gradients(lambda *each: by_library(ExpertsCall(*each, filled)), given, slope)
    wanted = with_gradients(lambda *each: experts.reference(*each, filled), exact, slope)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine.double() - other).norm() <= 0.01 * other.norm()
    assert not found[2][~kept].any()


@pytest.mark.usefixtures("poisoned")
@of_any_dtype
@pytest.mark.parametrize(("count", "hidden", "width"), [(8, 256, 128), (5, 100, 37), (128, 512, 192), (1, 64, 64)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 64, 129, 1000])
def test_products_in_tiles_are_near_float64(
    tokens: int, count: int, hidden: int, width: int, dtype: torch.dtype, bound: float
) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    per_token = min(2, count)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    weights, chosen = route(normal(tokens, count), None, per_token, True)
    floats = [normal(tokens, hidden), normal(count, 2 * width, hidden) / 16, normal(count, hidden, width) / 16]
    x, gate_up, down = (one.to(dtype) for one in floats)
    kept = torch.rand(chosen.shape, device="cuda") < 0.5
    whole = [x, weights, chosen, gate_up, down]
    for given in (whole, [x, weights, chosen.where(kept, -1), gate_up, down, int(kept.sum())]):
        exact = widened(given)
        found, wanted = by_tiles(ExpertsCall(*given)), experts.reference(*exact)
        assert found.dtype == dtype
        assert_within(found, wanted, bound)


@pytest.mark.usefixtures("poisoned")
@of_any_dtype
@pytest.mark.parametrize(
    ("count", "per_token", "hidden", "width"), [(9, 8, 2048, 768), (7, 6, 100, 37), (5, 1, 64, 24)]
)
def test_experts_of_a_token_are_near_float64(
    count: int, per_token: int, hidden: int, width: int, dtype: torch.dtype, bound: float
) -> None:
    tokens = 1
    weights, chosen = route(torch.randn(tokens, count, device="cuda"), None, per_token, True)
    shapes = (tokens, hidden), (count, 2 * width, hidden), (count, hidden, width)
    x, gate_up, down = ((torch.randn(shape, device="cuda") / 8).to(dtype) for shape in shapes)
    run = experts.bind("cuda")
    for given in (
        [x, weights, chosen, gate_up, down],
        [x, weights, chosen.where(chosen % 2 == 0, -1), gate_up, down, int((chosen % 2 == 0).sum())],
        *([[x, None, chosen, gate_up, down]] if per_token == 1 else []),
    ):
        exact = widened(given)
        assert run.choose(*given).name == "triton choices"
        found, wanted = run(*given), experts.reference(*exact)
        assert_within(found, wanted, bound)


@pytest.mark.usefixtures("poisoned")
@of_any_dtype
@pytest.mark.parametrize("tokens", [1, 40, 100, 700])
def test_biased_products_of_our_own_are_near_float64(tokens: int, dtype: torch.dtype, bound: float) -> None:
    count, hidden, width = 7, 192, 144
    weights, chosen = route(torch.randn(tokens, count, device="cuda"), None, 2, True)
    shapes = (tokens, hidden), (count, 2 * width, hidden), (count, hidden, width), (count, 2 * width), (count, hidden)
    x, gate_up, down, *biases = (torch.randn(shape, device="cuda") for shape in shapes)
    floats = [one.to(dtype) for one in (x, gate_up / 8, down / 8, *biases)]
    given = [floats[0], weights, chosen, *floats[1:], Clamp(1.702, 1.5)]
    exact = widened(given)
    run = biased_experts.bind("cuda")
    assert run.choose(*given).name == ("triton choices" if tokens == 1 else "triton tiles")
    for adds in (True, False):
        found, wanted = run(*given, adds), biased_experts.reference(*exact, adds)
        assert_within(found, wanted, bound)
    given[0][-1, 3] = torch.nan
    assert run(*given).isnan().all(1).tolist() == [False] * (tokens - 1) + [True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 2000])
def test_scores_in_float32_are_near_float64(tokens: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, 512, device="cuda", dtype=dtype), torch.randn(60, 512, device="cuda", dtype=dtype)
    found, wanted = wide_linear.bind("cuda")(x, weight), x.double() @ weight.double().t()
    assert found.dtype == torch.float32
    assert_within(found, wanted, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_floats_than_bfloat16_are_recorded(dtype: torch.dtype) -> None:
    x, weights, chosen, gate_up, down = inputs(33)
    given = [x.to(dtype), weights, chosen, gate_up.to(dtype), down.to(dtype)]
    bound = experts.bind("cuda")
    assert bound.choose(*given).name == "triton tiles"
    with torch.inference_mode():
        graph, found = captured(lambda: bound(*given))
        for shift in (0, 1, 5):
            given[0].copy_(given[0].roll(shift, 0))
            given[2].copy_((given[2] + shift) % 7)
            graph.replay()
            exact = widened(given)
            wanted = experts.reference(*exact)
            assert_within(found, wanted, 2e-3)


def test_a_rank_may_get_rows_for_none_of_its_experts() -> None:
    x, weights, chosen, gate_up, down = inputs(5)
    given = [x, weights, torch.full_like(chosen, -1), gate_up, down]
    found = with_gradients(lambda *each: by_library(ExpertsCall(*each, 0)), given, torch.ones_like(x))
    assert len(found) == 5
    assert not any(one.any() for one in found)


def slots_and_rows(tokens: int, per_token: int, share: float) -> tuple[Tensor, Tensor]:
    """source and place of `combine`: rows in random order in such a share of the places; the first token has none if
    some are without a row."""
    filled = torch.rand(tokens * per_token, device="cuda") < share
    filled[:per_token] = share == 1
    (held,) = filled.nonzero(as_tuple=True)
    source = held[torch.randperm(len(held), device="cuda")]
    rows = torch.arange(len(source), device="cuda")
    return source, torch.full_like(filled, -1, dtype=torch.int64).scatter(0, source, rows).view(tokens, per_token)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("share", [1, 0.5, 0])
@pytest.mark.parametrize(("tokens", "per_token", "hidden"), [(1, 1, 8), (7, 3, 100), (300, 8, 2048), (33, 2, 5000)])
def test_rows_are_added_up_as_in_float64(
    tokens: int, per_token: int, hidden: int, share: float, dtype: torch.dtype
) -> None:
    orders = slots_and_rows(tokens, per_token, share)
    rows = torch.randn(len(orders[0]), hidden, device="cuda").to(dtype)
    weights = torch.rand(tokens, per_token, device="cuda") + 0.1
    tolerance = 5e-3 if dtype == torch.bfloat16 else 1e-5
    bound = combine.bind("cuda")
    for scales in (weights, None):
        assert bound.choose(rows, *orders, scales).name == "triton"
        exact = combine.reference(rows.double(), *orders, None if scales is None else scales.double())
        assert (bound(rows, *orders, scales).double() - exact).norm() <= tolerance * exact.norm()
    assert combine.bind("cuda", differentiable=True).choose(rows, *orders, weights).name == "triton with gradients"
    # A slope along the rows, so that the gradient of a weight is no sum that cancels out.
    slope = combine(rows, *orders, weights)
    for run, given in (
        (lambda rows, weights: combine(rows, *orders, weights), [rows, weights]),
        (lambda rows: summed(rows, *orders), [rows]),
    ):
        found = with_gradients(run, given, slope)
        wanted = with_gradients(run, [one.double() for one in given], slope)
        for mine, other in zip(found, wanted, strict=True):
            assert_within(mine, other, tolerance)


def test_nothing_waits_for_the_device() -> None:
    given = inputs(100)
    slope = torch.randn(100, 256, device="cuda").to(torch.bfloat16)
    chosen = experts.bind("cuda", differentiable=True).choose(*given)
    assert chosen.name == "grouped"
    run = experts.of_arguments(chosen.run)
    gaps = [*given[:2], given[2].int().where(given[2] != given[2][0, 0], -1), *given[3:]]
    filled = int((gaps[2] >= 0).sum())
    with_gradients(run, given, slope)
    with no_waiting():
        with_gradients(run, given, slope)
        with_gradients(lambda *each: run(*each, filled), gaps, slope)


COUNT, SLOTS, PERIOD = 16, 20, 6
# Experts 0 to 3 have a second copy, in the last slots.
COPIES = [[expert, 16 + expert] if expert < 4 else [expert] for expert in range(COUNT)]


def table() -> Tensor:
    rows = [[slots[turn % len(slots)] for turn in range(PERIOD)] for slots in COPIES]
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


def rank_inputs(tokens: int, per_token: int, dtype: torch.dtype, hidden: int, width: int) -> list[Tensor]:
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
    exact = widened(given)
    found, wanted = run(LocalExpertsCall(*given)), local_experts.reference(*exact)
    assert found.dtype == given[0].dtype
    assert torch.equal(found.any(1) | ~found.isfinite().all(1), wanted.any(1))
    assert_within(found, wanted, bound)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("hidden", "width"), [(256, 128), (100, 37), (512, 192)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 64, 129, 1000, 3000])
@pytest.mark.parametrize("placed", [False, True])
def test_tiles_are_near_float64(placed: bool, tokens: int, hidden: int, width: int, dtype: torch.dtype) -> None:
    given = rank_inputs(tokens, 4, dtype, hidden, width)
    for first, held in ((0, 4), (3, 9), (15, 1)) if not placed else ((0, 7), (13, 7)):
        near_float64(by_tiles, part(given, first, held, table() if placed else None), BOUNDS[dtype])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tokens", [1, 64, 3000])
@pytest.mark.parametrize("placed", [False, True])
def test_the_library_is_near_float64(placed: bool, tokens: int) -> None:
    given = rank_inputs(tokens, 4, torch.bfloat16, 256, 128)
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
    given = rank_inputs(33, 4, torch.bfloat16, 256, 128)
    given[2] = given[2] % 8
    own = part(given, 12, 4, None)
    for run in (by_tiles, by_library):
        assert not run(LocalExpertsCall(*own)).any()


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 33), (torch.float16, 3000), (torch.bfloat16, 3000)])
def test_a_recorded_part_follows_its_inputs(dtype: torch.dtype, tokens: int) -> None:
    given = rank_inputs(tokens, 4, dtype, 256, 128)
    own = part(given, 13, 7, table())
    bound = local_experts.bind("cuda")
    with torch.inference_mode():
        bound(*own)
        with no_waiting():
            bound(*own)
        graph, found = captured(lambda: bound(*own))
        for shift in (0, 1, 5):
            given[0].copy_(given[0].roll(shift, 0))
            given[2].copy_((given[2] + shift) % COUNT)
            graph.replay()
            exact = widened(own)
            wanted = local_experts.reference(*exact)
            assert_within(found, wanted, 1e-2)


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
