"""Routing on CUDA in one launch: against the reference, by ties and numbers that are none, and in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strata.kernels.moe.route import SOFTMAX, Choice, route
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
    RUN(logits, None, 8, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = RUN(logits, None, 8, True)
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
            (torch.randn(3, 8, device="cuda"), 2, Choice("sigmoid", 8, 4, "top2")),
        )
    ]
    assert names == ["torch"] * 5
    logits = torch.randn(3, 8, device="cuda", requires_grad=True)
    weights, _ = route(logits, None, 2, True)
    assert weights.grad_fn is not None
