"""Routing, experts and counts of choices against plain twins, by hand and as transformers has them; their costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import DeepseekV2Config, Glm4MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.linear import wide_linear
from strata.kernels.moe import experts as moe_experts
from strata.kernels.moe.combine import combine, give_back, summed, take_rows
from strata.kernels.moe.count import count_choices
from strata.kernels.moe.experts import by_library, experts
from strata.kernels.moe.local_order import Order
from strata.kernels.moe.route import ExpertChoice, route
from strata.kernels.state.dcp_shard import ELSEWHERE

WAYS = [{}, {"deterministic": True}, {"differentiable": True}]
STEP = Workload((6,), (6,))


def inputs(tokens: int, per_token: int, count: int = 5, hidden: int = 16, width: int = 8) -> list[Tensor]:
    """The last expert is never chosen."""
    chosen = torch.rand(tokens, count - 1).argsort(1)[:, :per_token].contiguous()
    return [
        torch.randn(tokens, hidden),
        torch.rand(tokens, per_token),
        chosen,
        torch.randn(count, 2 * width, hidden),
        torch.randn(count, hidden, width),
    ]


def with_gaps(given: list[Tensor]) -> list[Tensor | int]:
    """Some tokens go to fewer experts, the first to none."""
    x, weights, chosen, *matrices = given
    kept = torch.rand(chosen.shape) < 0.4
    kept[:1] = False
    return [x, weights, chosen.int().where(kept, -1), *matrices, int(kept.sum())]


def places(tokens: int, slots: int, rows: int) -> tuple[Tensor, Tensor]:
    """Where so many rows lie, in random order, and in which slot of which token each is; unless all slots have one, the
    first token has none."""
    first = 0 if rows == tokens * slots else slots
    source = (first + torch.randperm(tokens * slots - first))[:rows]
    return source, torch.full((tokens * slots,), -1).scatter(0, source, torch.arange(rows)).view(tokens, slots)


def twin(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, filled: int = 0) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for row, scales, numbers in zip(x, weights, chosen.tolist(), strict=True):
        total = torch.zeros_like(row)
        for scale, number in zip(scales, numbers, strict=True):
            if number == -1:
                continue
            gate, up = (gate_up[number] @ row).chunk(2)
            total = total + scale * (down[number] @ (gate * gate.sigmoid() * up))
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("tokens", "per_token"), [(1, 1), (6, 2), (7, 3), (33, 4), (0, 2)])
def test_experts_are_the_weighted_sum(tokens: int, per_token: int, way: dict, gaps: bool) -> None:
    given = with_gaps(inputs(tokens, per_token)) if gaps else inputs(tokens, per_token)
    torch.testing.assert_close(experts.bind("cpu", **way)(*given), twin(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "run", [experts.reference, experts.bind("cpu", differentiable=True), experts.of_arguments(by_library)]
)
@pytest.mark.parametrize(
    ("per_token", "weighted", "gaps"),
    [(3, True, False), (1, True, False), (1, False, False), (3, True, True), (1, True, True)],
)
def test_gradients_are_those_of_the_twin_and_zero_for_an_expert_without_tokens(
    run: Callable[..., Tensor], per_token: int, weighted: bool, gaps: bool
) -> None:
    x, weights, *others = with_gaps(inputs(7, per_token)) if gaps else inputs(7, per_token)
    given = [x, weights if weighted else torch.ones(7, 1), *others]
    slope, grads = torch.randn(7, 16), []
    for call in (run, twin):
        leaves = [one.clone().requires_grad_(one.is_floating_point()) for one in given[:5]]
        scales = leaves[1] if weighted or call is twin else None
        (call(leaves[0], scales, *leaves[2:], *given[5:]) * slope).sum().backward()
        grads.append([leaves[place].grad for place in (0, *([1] if weighted else []), 3, 4)])
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    assert not grads[0][-2][-1].any()


@pytest.mark.parametrize("way", WAYS)
def test_without_weights_a_token_has_one_expert(way: dict) -> None:
    x, weights, chosen, *matrices = inputs(9, 1)
    run = experts.bind("cpu", **way)
    torch.testing.assert_close(run(x, None, chosen, *matrices), run(x, torch.ones_like(weights), chosen, *matrices))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("tokens", "slots", "rows"), [(4, 3, 12), (5, 3, 7), (4, 1, 3), (3, 7, 0), (1, 4, 0)])
def test_rows_of_a_token_are_added_up_wherever_they_lie(tokens: int, slots: int, rows: int, weighted: bool) -> None:
    """Slots without a row add nothing."""
    source, place = places(tokens, slots, rows)
    given, weights = torch.randn(rows, 5, dtype=torch.float64), torch.rand(tokens, slots).double()
    leaves = (given, weights) if weighted else (given,)

    def run(rows: Tensor, weights: Tensor | None = None) -> Tensor:
        return combine(rows, source, place, weights)

    found, wanted = run(*leaves), torch.zeros(tokens, 5).double()
    for at, slot in enumerate(source.tolist()):
        wanted[slot // slots] += given[at] * (weights.flatten()[slot] if weighted else 1)
    torch.testing.assert_close(found, wanted)
    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("rows", [0, 7, 12])
def test_a_sum_saves_nothing_by_which_a_layer_would_be_computed_again(rows: int) -> None:
    source, place = places(5, 3, rows)
    given, saved = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        found = summed(given, source, place)
    assert not saved
    assert torch.equal(found, combine(given, source, place, None))
    assert torch.autograd.gradcheck(lambda x: summed(x, source, place), given)


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


def test_slots_without_an_expert_have_no_place() -> None:
    chosen = torch.tensor([[3, -1], [-1, -1], [0, 3], [-1, 2]], dtype=torch.int32)
    order = Order.of(chosen, 5, empty=True).with_rows(4)
    assert order.ends.tolist() == [1, 1, 2, 4, 4]
    assert order.source.tolist() == [4, 7, 0, 5]
    assert order.inverse.tolist() == [[2, -1], [-1, -1], [0, 3], [-1, 1]]
    x = torch.randn(4, 3, requires_grad=True)
    rows = take_rows(x, order)
    assert torch.equal(rows, x[[2, 3, 0, 2]])
    rows.sum().backward()
    assert torch.equal(x.grad, torch.tensor([1.0, 0, 2, 1])[:, None].expand(4, 3))


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "width", "weights_of"), [(16, 8, "wide"), (20, 7, "wide"), (16, 8, "narrow")])
def test_cuda_has_a_way_that_asks_the_host_for_nothing(
    dtype: torch.dtype, hidden: int, width: int, weights_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As capturing a step in a CUDA graph demands: a tensor without values cannot tell the host any."""
    pytest.importorskip("triton")
    given = [one.to(dtype) if one.is_floating_point() else one for one in inputs(6, 2, hidden=hidden, width=width)]
    if weights_of == "wide":  # as a router makes them
        given[1] = given[1].float()
    chosen = experts.bind("cuda").choose(*given)
    assert chosen.name == "triton tiles"

    def product(
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        source: Tensor | None = None,
        per_token: int = 1,
        gated: bool = False,
        **without: None,
    ) -> Tensor:
        assert (ends.dtype, ends.shape) == (torch.int32, weight.shape[:1])
        assert x.shape[1] == weight.shape[2]
        assert source is None or len(source) == per_token * len(x)
        return x.new_empty(len(x if source is None else source), weight.shape[1] // (2 if gated else 1))

    monkeypatch.setattr(moe_experts, "grouped_product", product)
    with FakeTensorMode() as mode, torch.inference_mode():
        fake = [mode.from_tensor(one) for one in given]
        assert chosen.run(*experts.call_args(*fake)).shape == (6, hidden)
        with pytest.raises(DataDependentOutputException):
            experts.reference(*fake)


def test_costs_are_those_counted_by_hand() -> None:
    given = [one.to(torch.bfloat16) if one.is_floating_point() else one for one in inputs(6, 2)]
    given[1] = given[1].float()
    # 12 rows; an expert has 3 matrices of 16 * 8, 768 bytes; 16-wide rows of 2 bytes. Each of 6 tokens misses an
    # expert with probability 3 / 5, so 5 * (1 - 0.6**6) = 4.76672 experts are read.
    flops = 12 * (3 * 2 * 16 * 8) + 12 * 5 * 8 + 12 * 2 * 16
    assert experts.cost(*given, workload=STEP) == Cost(flops, 192 + 48 + 96 + 3661, 192, 3661)
    assert experts.meta(*given).shape == (6, 16)
    # Of the 12 places 3 have an expert: a token misses one with probability 0.9, and 5 * (1 - 0.9**6) are read.
    gaps = [given[0], given[1], given[2].int(), *given[3:], 3]
    assert experts.cost(*gaps, workload=STEP) == Cost(3 * (768 + 40 + 32), 192 + 48 + 48 + 1799, 192, 1799)
    assert experts.meta(*gaps).shape == (6, 16)
    # One expert a token: nothing is weighted, and 5 * (1 - 0.8**6) experts are read.
    alone = [given[0], None, given[2][:, :1], *given[3:]]
    assert experts.cost(*alone, workload=STEP) == Cost(6 * (768 + 40), 192 + 48 + 2833, 192, 2833)
    rows, place = torch.randn(12, 16, dtype=torch.bfloat16), torch.arange(12)
    assert combine.cost(rows, place, place.view(6, 2), torch.rand(6, 2), workload=STEP) == Cost(384, 384 + 96 + 48, 192)
    assert combine.cost(rows, place, place.view(6, 2), None, workload=STEP) == Cost(192, 384 + 96, 192)
    assert combine.meta(rows, place, place.view(6, 2), None).shape == (6, 16)
    source, place = places(6, 2, 5)
    rows, weights = rows[:5], torch.rand(6, 2)
    assert combine.cost(rows, source, place, weights, workload=STEP) == Cost(160, 160 + 96 + 48, 192)
    assert combine.cost(rows, source, place, None, workload=STEP) == Cost(80, 160 + 96, 192)
    assert combine.meta(rows, source, place, weights).shape == (6, 16)
    logits = torch.randn(6, 5, dtype=torch.bfloat16)
    assert route.cost(logits, None, 2, True, workload=STEP) == Cost(6 * 5 * 4 + 6 * 2 * 2, 60, 6 * 2 * 12)
    assert [one.dtype for one in route.meta(logits, None, 2, True)] == [torch.float32, torch.int64]


def test_sigmoids_of_the_best_two_groups_by_hand() -> None:
    """Three groups of two; the bias lets the last group win and is not in the weights."""
    logits = torch.tensor([[3.0, 0.0, 1.0, 0.5, -1.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.7, 0.7])
    s = [1 / (1 + 2.718281828**-x) for x in logits[0].tolist()]
    # Groups: s0 + s1 = 1.45, s2 + s3 = 1.35, s4 + s5 + 1.4 = 1.94: the second is left out.
    weights, chosen = route(logits, bias, 3, True, ExpertChoice("sigmoid", 3, 2, "top2", 2.5))
    assert sorted(chosen[0].tolist()) == [0, 4, 5]
    total = s[0] + s[4] + s[5]
    wanted = [2.5 * s[expert] / total for expert in chosen[0].tolist()]
    torch.testing.assert_close(weights[0], torch.tensor(wanted))


def test_groups_by_their_best_expert_by_hand() -> None:
    """The second and fourth best expert stand in a group that is left out."""
    logits = torch.tensor([[4.0, 0.0, 3.0, 2.9, 2.0, 1.0]])
    _, chosen = route(logits, None, 2, False, ExpertChoice(groups=3, kept=1))
    assert chosen.tolist() == [[0, 1]]
    weights, chosen = route(logits, None, 3, False, ExpertChoice(groups=2, kept=1, scale=16.0))
    assert chosen.tolist() == [[0, 2, 1]]
    torch.testing.assert_close(weights[0], 16 * logits[0].softmax(-1)[[0, 2, 1]])


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
def test_sigmoids_are_routed_as_transformers_does(groups: int, kept: int, normalized: bool) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": groups}
    config = Glm4MoeConfig(**sizes, topk_group=kept, norm_topk_prob=normalized, routed_scaling_factor=2.5)
    router = Glm4MoeTopkRouter(config)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.e_score_correction_bias, std=0.3)
    logits, weights, chosen = router(torch.randn(40, 16))
    choice = ExpertChoice("sigmoid", groups, kept, "top2", 2.5)
    assert_alike(route(logits, router.e_score_correction_bias, 3, normalized, choice), (weights, chosen), 12)


def test_groups_of_softmaxes_are_routed_as_transformers_does() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4}
    config = DeepseekV2Config(
        **sizes, num_attention_heads=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0
    )
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    logits, weights, chosen = router(torch.randn(40, 16))
    assert_alike(route(logits, None, 3, False, ExpertChoice("softmax", 4, 2, "max", 16.0)), (weights, chosen), 12)


def assert_alike(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...], count: int) -> None:
    """The weight of every expert, in whatever order a token's are told."""
    found, wanted = (torch.zeros(40, count).scatter(-1, chosen, weights) for weights, chosen in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_a_sigmoid_of_nothing_is_no_division_by_zero() -> None:
    weights, _ = route(torch.full((1, 4), -200.0), None, 2, True, ExpertChoice("sigmoid"))
    assert weights.isfinite().all()


def test_scores_are_float32_whatever_the_inputs_are() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(6, 64).bfloat16()
    wanted = (x.double() @ weight.double().T).float()
    for run in (wide_linear, wide_linear.bind("cpu", deterministic=True)):
        torch.testing.assert_close(run(x, weight), wanted, rtol=1e-5, atol=1e-5)


def test_choices_of_a_layer_are_added_and_padding_is_not() -> None:
    chosen = torch.tensor([[2, 0], [2, 1], [0, 3], [2, 3]])
    slot_mapping = torch.tensor([7, 9, -1, 4], dtype=torch.int32)
    totals = torch.arange(8).view(2, 4)
    for run in (count_choices.reference, count_choices.bind("cpu"), count_choices.bind("cpu", deterministic=True)):
        found = run(chosen, slot_mapping, totals, 1)
        assert found is chosen
    assert totals.tolist() == [[0, 1, 2, 3], [4 + 3, 5 + 3, 6 + 9, 7 + 3]]


def test_tokens_that_other_ranks_keep_are_counted_as_those_kept_here() -> None:
    """All ranks compute all tokens, and each has to know how often an expert is chosen, whoever keeps their keys."""
    slot_mapping = torch.tensor([ELSEWHERE, 3, -1, ELSEWHERE], dtype=torch.int32)
    for run in (count_choices.reference, count_choices.bind("cpu")):
        totals = torch.zeros(1, 4, dtype=torch.int64)
        run(torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]]), slot_mapping, totals, 0)
        assert totals.tolist() == [[3, 1, 1, 1]]


def test_no_tokens_add_nothing() -> None:
    totals = torch.zeros(1, 4, dtype=torch.int64)
    count_choices(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.int32), totals, 0)
    assert not totals.any()


def test_cost() -> None:
    chosen, slot_mapping = torch.zeros(6, 2, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    totals = torch.zeros(3, 8, dtype=torch.int64)
    cost = count_choices.cost(chosen, slot_mapping, totals, 0, workload=Workload((6,), (6,)))
    assert cost == Cost(12, 96 + 24 + 96, 96)
    assert count_choices.meta(chosen, slot_mapping, totals, 0).shape == (6, 2)
