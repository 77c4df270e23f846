"""Routing and experts against plain twins, in every way they run on a CPU, and their cost against hand counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.moe_combine import combine
from strata.kernels.moe_experts import Order, experts, give_back, grouped, take_rows
from strata.kernels.moe_route import route

WAYS = [{}, {"deterministic": True}, {"differentiable": True}]
STEP = Workload((6,), (6,))


def inputs(tokens: int, per_token: int, count: int = 5, hidden: int = 16, width: int = 8) -> list[Tensor]:
    """The last expert is never chosen."""
    chosen = torch.stack([torch.randperm(count - 1)[:per_token] for _ in range(tokens)] or [torch.empty(0, per_token)])
    chosen = chosen[:tokens].long()
    return [
        torch.randn(tokens, hidden),
        torch.rand(tokens, per_token),
        chosen,
        torch.randn(count, 2 * width, hidden),
        torch.randn(count, hidden, width),
    ]


def twin(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for row, scales, numbers in zip(x, weights, chosen.tolist(), strict=True):
        total = torch.zeros_like(row)
        for scale, number in zip(scales, numbers, strict=True):
            gate, up = (gate_up[number] @ row).chunk(2)
            total = total + scale * (down[number] @ (gate * gate.sigmoid() * up))
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tokens", "per_token"), [(1, 1), (6, 2), (33, 4), (0, 2)])
def test_experts_are_the_weighted_sum(tokens: int, per_token: int, way: dict) -> None:
    given = inputs(tokens, per_token)
    torch.testing.assert_close(experts.bind("cpu", **way)(*given), twin(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", [experts.reference, experts.bind("cpu", differentiable=True), grouped])
@pytest.mark.parametrize(("per_token", "weighted"), [(3, True), (1, True), (1, False)])
def test_gradients_are_those_of_the_twin_and_zero_for_an_expert_without_tokens(
    run: object, per_token: int, weighted: bool
) -> None:
    x, weights, *others = inputs(7, per_token)
    given = [x, weights if weighted else torch.ones(7, 1), *others]
    places = [0, 1, 3, 4] if weighted else [0, 3, 4]
    slope = torch.randn(7, 16)
    found, wanted = [], []
    for call, into in ((run, found), (twin, wanted)):
        leaves = [one.clone().requires_grad_(one.is_floating_point()) for one in given]
        assert callable(call)
        scales = leaves[1] if weighted or call is twin else None
        (call(leaves[0], scales, *leaves[2:]) * slope).sum().backward()
        into += [leaves[place].grad for place in places]
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert not found[-2][-1].any()


@pytest.mark.parametrize("way", WAYS)
def test_without_weights_a_token_has_one_expert(way: dict) -> None:
    x, weights, chosen, *matrices = inputs(9, 1)
    run = experts.bind("cpu", **way)
    torch.testing.assert_close(run(x, None, chosen, *matrices), run(x, torch.ones_like(weights), chosen, *matrices))


@pytest.mark.parametrize("weighted", [True, False])
def test_rows_of_a_token_are_added_up_wherever_they_lie(weighted: bool) -> None:
    rows, weights, place = torch.randn(12, 5, dtype=torch.float64), torch.rand(4, 3).double(), torch.randperm(12)
    source, place = place.argsort(), place.view(4, 3)
    leaves = (rows, weights) if weighted else (rows,)

    def run(rows: Tensor, weights: Tensor | None = None) -> Tensor:
        return combine(rows, source, place, weights)

    found = run(*leaves)
    for token in range(4):
        scales = weights[token] if weighted else torch.ones(3)
        wanted = sum(scale * rows[at] for scale, at in zip(scales, place[token], strict=True))
        torch.testing.assert_close(found[token], wanted)
    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in leaves])


def test_gradients_in_float64() -> None:
    given = [one.double() if one.is_floating_point() else one for one in inputs(4, 2, hidden=5, width=3)]

    def run(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return experts(x, weights, given[2], gate_up, down)

    leaves = [one.requires_grad_() for one in given if one.is_floating_point()]
    assert torch.autograd.gradcheck(run, leaves)


def test_rows_are_sorted_by_expert_and_come_back() -> None:
    chosen = torch.tensor([[3, 0], [0, 2], [3, 2]])
    order = Order.of(chosen, 5)
    assert order.ends.tolist() == [2, 2, 4, 6, 6]
    assert (order.source // 2).tolist() == [0, 1, 1, 2, 0, 2]
    x = torch.randn(3, 4)
    torch.testing.assert_close(give_back(take_rows(x, order), order, torch.full((3, 2), 0.5)), x)


def test_fixed_tiles_do_not_depend_on_the_other_tokens() -> None:
    given = inputs(40, 2)
    run = experts.bind("cpu", deterministic=True)
    whole = run(*given)
    for row in (0, 17, 39):
        alone = [one[row : row + 1] for one in given[:3]]
        assert torch.equal(run(*alone, *given[3:]), whole[row : row + 1])


@pytest.mark.parametrize("normalized", [False, True])
def test_routing_takes_the_likeliest(normalized: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    weights, chosen = route(logits, None, 2, normalized)
    probabilities = logits[0].exp() / logits[0].exp().sum()
    wanted = probabilities[[1, 2]]
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], wanted / wanted.sum() if normalized else wanted)


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    weights, chosen = route(logits, torch.tensor([0.0, 0.0, 0.0, 1.0]), 2, False)
    assert chosen.tolist() == [[3, 1]]
    torch.testing.assert_close(weights[0], logits[0].softmax(-1)[[3, 1]])


def test_costs_are_those_counted_by_hand() -> None:
    given = [one.to(torch.bfloat16) if one.is_floating_point() else one for one in inputs(6, 2)]
    given[1] = given[1].float()
    # 12 rows; an expert has 3 matrices of 16 * 8; 5 experts of 768 bytes are read; 16-wide rows of 2 bytes.
    flops = 12 * (3 * 2 * 16 * 8) + 12 * 5 * 8 + 12 * 2 * 16
    assert experts.cost(*given, workload=STEP) == Cost(flops, 192 + 48 + 96 + 5 * 768, 192, 5 * 768)
    assert experts.meta(*given).shape == (6, 16)
    # One expert a token: nothing is weighted.
    alone = [given[0], None, given[2][:, :1], *given[3:]]
    assert experts.cost(*alone, workload=STEP) == Cost(6 * (768 + 40), 192 + 48 + 5 * 768, 192, 5 * 768)
    rows, place = torch.randn(12, 16, dtype=torch.bfloat16), torch.arange(12)
    assert combine.cost(rows, place, place.view(6, 2), torch.rand(6, 2), workload=STEP) == Cost(384, 384 + 96 + 48, 192)
    assert combine.cost(rows, place, place.view(6, 2), None, workload=STEP) == Cost(192, 384 + 96, 192)
    assert combine.meta(rows, place, place.view(6, 2), None).shape == (6, 16)
    logits = torch.randn(6, 5, dtype=torch.bfloat16)
    assert route.cost(logits, None, 2, True, workload=STEP) == Cost(6 * 5 * 4 + 6 * 2 * 2, 60, 6 * 2 * 12)
    assert [one.dtype for one in route.meta(logits, None, 2, True)] == [torch.float32, torch.int64]
