"""Routing on CUDA in one launch, and the order of choices by expert: the references' whatever comes, in any company."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.moe.local_order import Order, local_numbers, local_order
from strata.kernels.moe.route import SOFTMAX, ExpertChoice, route
from tests.gpu.tensors import captured, no_waiting
from tests.kernels.moe.routes import (
    ROUTES,
    assert_no_number_leads_astray,
    assert_routed,
    assert_ties_go_to_the_lower_number,
    distinct,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]

RUN = route.bind("cuda", deterministic=True)


def inputs(tokens: int, count: int, biased: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
    bias = torch.randn(count, device="cuda") * 0.3 if biased else None
    if dtype == torch.float32:
        return torch.randn(tokens, count, device="cuda"), bias
    return distinct(tokens, count, dtype, "cuda"), bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 3, 64, 257, 3000])
@pytest.mark.parametrize("name", ROUTES)
def test_weights_and_choice_are_the_references(name: str, tokens: int, dtype: torch.dtype) -> None:
    count, per_token, biased, *how = ROUTES[name]
    logits, bias = inputs(tokens, count, biased, dtype)
    assert RUN.choose(logits, bias, per_token, *how).name == "triton"
    assert_routed(RUN, logits, bias, per_token, *how)


def test_ties_go_to_the_lower_number() -> None:
    assert_ties_go_to_the_lower_number(RUN, "cuda")


@pytest.mark.parametrize("name", ROUTES)
def test_no_number_leads_astray(name: str) -> None:
    assert_no_number_leads_astray(RUN, "cuda", *ROUTES[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ROUTES)
def test_a_token_goes_the_same_way_in_any_company(name: str, dtype: torch.dtype) -> None:
    count, per_token, biased, *how = ROUTES[name]
    logits, bias = inputs(300, count, biased, dtype)
    whole = RUN(logits, bias, per_token, *how)
    wider = torch.cat((logits.new_zeros(300, 5), logits), 1)[:, 5:]  # rows that begin anywhere
    for some, rows in ((wider, slice(None)), (logits[7:8], slice(7, 8)), (logits[1:100], slice(1, 100))):
        for found, wanted in zip(RUN(some, bias, per_token, *how), whole, strict=True):
            assert torch.equal(found, wanted[rows])


def test_a_recorded_choice_follows_its_logits() -> None:
    logits, _ = inputs(33, 128, False)
    graph, found = captured(lambda: RUN(logits, None, 8, True))
    for _ in range(3):
        logits.normal_()
        graph.replay()
        for one, other in zip(found, RUN(logits, None, 8, True), strict=True):
            assert torch.equal(one, other)


def test_what_the_kernel_does_not_take_is_left_to_torch() -> None:
    names = [
        RUN.choose(logits, None, per_token, True, choice).name
        for logits, per_token, choice in (
            (torch.randn(3, 8, device="cuda", dtype=torch.float64), 2, SOFTMAX),
            (torch.randn(8, 3, device="cuda").t(), 2, SOFTMAX),
            (torch.randn(3, 1100, device="cuda"), 2, SOFTMAX),
            (torch.randn(3, 64, device="cuda"), 17, SOFTMAX),
            (torch.randn(3, 8, device="cuda"), 2, ExpertChoice("sigmoid", 8, 4, "top2")),
        )
    ]
    assert names == ["torch"] * 5
    logits = torch.randn(3, 8, device="cuda", requires_grad=True)
    weights, _ = route(logits, None, 2, True)
    assert weights.grad_fn is not None


def choices(tokens: int, per_token: int, count: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """As a router's, more often of experts with low numbers."""
    scores = torch.rand(tokens, count, device="cuda") * torch.linspace(1, 0.5, count, device="cuda")
    return scores.argsort(1, descending=True)[:, :per_token].to(dtype).contiguous()


def assert_sorted(chosen: Tensor, first: int, held: int, *tables: Any) -> None:
    found = local_order(chosen, first, held, *tables)
    wanted = Order.of(local_numbers(chosen, first, held, *(tables or [None])), held, empty=True)
    for mine, other in zip(astuple(found), astuple(wanted), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("count", "per_token"), [(1, 1), (7, 2), (8, 2), (60, 4), (64, 6), (128, 8), (512, 10), (1024, 16)]
)
@pytest.mark.parametrize("tokens", [0, 1, 3, 100, 1024, 1025, 3000, 8192])
def test_choices_of_all_experts(tokens: int, count: int, per_token: int, dtype: torch.dtype) -> None:
    chosen = choices(tokens, per_token, count, dtype)
    assert_sorted(chosen, 0, count)
    assert_sorted(chosen.where(torch.rand(chosen.shape, device="cuda") < 0.7, -1), 0, count)


@pytest.mark.parametrize("only", [0, 5, 127])
def test_all_choose_the_same(only: int) -> None:
    assert_sorted(torch.full((thresholds_of(MEASURED).sorted_choices // 2 + 9, 2), only, device="cuda"), 0, 128)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("tokens", [33, 1024, 1025, 5000])
def test_choices_of_a_rank(tokens: int, placed: bool, padded: bool) -> None:
    chosen = choices(tokens, 8, 64)
    placement = torch.randint(80, (64, 6), device="cuda", dtype=torch.int32) if placed else None
    mapping = torch.randint(-1, 2, (tokens,), device="cuda", dtype=torch.int32) if padded else None
    for first, held in ((0, 64), (16, 16), (63, 1), (60, 20)):
        assert_sorted(chosen, first, held, placement, mapping)


@pytest.mark.parametrize("tokens", [33, 3000])
def test_a_recorded_order_follows_its_choices(tokens: int) -> None:
    chosen = choices(tokens, 8, 64)
    local_order(chosen, 0, 64)
    with no_waiting():
        local_order(chosen, 0, 64)
    graph, found = captured(lambda: local_order(chosen, 0, 64))
    for shift in (0, 1, 5):
        chosen.copy_((chosen + shift) % 64)
        graph.replay()
        for mine, other in zip(astuple(found), astuple(Order.of(chosen, 64)), strict=True):
            assert torch.equal(mine, other)
