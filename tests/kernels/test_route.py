"""Choosing experts by independent scores and by groups: by hand, and against transformers' routers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, Glm4MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.wide_linear import wide_linear
from strata.kernels.moe.route import SOFTMAX, Choice, route

from .test_invariance import ROWS, assert_rows_stand_alone


def test_sigmoids_of_the_best_two_groups_by_hand() -> None:
    """Three groups of two; the bias lets the last group win and is not in the weights."""
    logits = torch.tensor([[3.0, 0.0, 1.0, 0.5, -1.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.7, 0.7])
    s = [1 / (1 + 2.718281828**-x) for x in logits[0].tolist()]
    # Groups: s0 + s1 = 1.45, s2 + s3 = 1.35, s4 + s5 + 1.4 = 1.94: the second is left out.
    weights, chosen = route(logits, bias, 3, True, Choice("sigmoid", 3, 2, "top2", 2.5))
    assert sorted(chosen[0].tolist()) == [0, 4, 5]
    total = s[0] + s[4] + s[5]
    wanted = [2.5 * s[expert] / total for expert in chosen[0].tolist()]
    torch.testing.assert_close(weights[0], torch.tensor(wanted))


def test_groups_by_their_best_expert_by_hand() -> None:
    """The second and fourth best expert stand in a group that is left out."""
    logits = torch.tensor([[4.0, 0.0, 3.0, 2.9, 2.0, 1.0]])
    _, chosen = route(logits, None, 2, False, Choice(groups=3, kept=1))
    assert chosen.tolist() == [[0, 1]]
    weights, chosen = route(logits, None, 3, False, Choice(groups=2, kept=1, scale=16.0))
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
    choice = Choice("sigmoid", groups, kept, "top2", 2.5)
    assert_alike(route(logits, router.e_score_correction_bias, 3, normalized, choice), (weights, chosen), 12)


def test_groups_of_softmaxes_are_routed_as_transformers_does() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4}
    config = DeepseekV2Config(
        **sizes, num_attention_heads=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0
    )
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    logits, weights, chosen = router(torch.randn(40, 16))
    assert_alike(route(logits, None, 3, False, Choice("softmax", 4, 2, "max", 16.0)), (weights, chosen), 12)


@pytest.mark.parametrize("choice", [SOFTMAX, Choice("sigmoid", 4, 2, "top2", 2.5)])
def test_a_token_goes_the_same_way_in_any_company(choice: Choice) -> None:
    logits, bias = torch.randn(ROWS, 12), torch.randn(12)
    run = route.bind("cpu", deterministic=True)

    def routed(rows: torch.Tensor) -> torch.Tensor:
        weights, chosen = run(logits[rows], bias, 3, True, choice)
        return torch.cat((weights, chosen.float()), -1)

    assert_rows_stand_alone(routed)


def assert_alike(ours: tuple[torch.Tensor, ...], theirs: tuple[torch.Tensor, ...], count: int) -> None:
    """The weight of every expert, in whatever order a token's are told."""
    found, wanted = (torch.zeros(40, count).scatter(-1, chosen, weights) for weights, chosen in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


def test_gradients_are_those_of_finite_differences() -> None:
    logits = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    choice = Choice("sigmoid", 4, 2, "top2", 2.5)
    bias = torch.randn(8)
    assert torch.autograd.gradcheck(lambda x: route(x, bias, 3, True, choice)[0], (logits,))


def test_a_sigmoid_of_nothing_is_no_division_by_zero() -> None:
    weights, _ = route(torch.full((1, 4), -200.0), None, 2, True, Choice("sigmoid"))
    assert weights.isfinite().all()


def test_cost_is_the_hand_count() -> None:
    """Five tokens, eight experts, two a token: scores, two comparisons each for groups, sum, division, scale."""
    logits = torch.empty(5, 8, dtype=torch.bfloat16, device="meta")
    choice = Choice("sigmoid", 4, 2, "top2", 2.5)
    cost = route.cost(logits, None, 2, True, choice, workload=Workload((5,), (5,)))
    assert cost == Cost(5 * 8 * 4 + 5 * 8 * 2 + 5 * 2 * 2 + 5 * 2, 80, 5 * 2 * 12)


def test_scores_are_float32_whatever_the_inputs_are() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(6, 64).bfloat16()
    wanted = (x.double() @ weight.double().T).float()
    for run in (wide_linear, wide_linear.bind("cpu", deterministic=True)):
        torch.testing.assert_close(run(x, weight), wanted, rtol=1e-5, atol=1e-5)
    cost = wide_linear.cost(x, weight, workload=Workload((5,), (5,)))
    assert cost == Cost(2 * 5 * 64 * 6, 5 * 128 + 6 * 128, 5 * 6 * 4, 6 * 128)
