"""The order of choices by expert on CUDA: that of torch's sort to the last number, however many there are."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import Tensor

from strata.kernels.choose import MEASURED, thresholds_of
from strata.kernels.moe.local_order import local_numbers, local_order
from strata.kernels.moe.order import Order

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


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
    torch.cuda.set_sync_debug_mode("error")
    try:
        local_order(chosen, 0, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = local_order(chosen, 0, 64)
    for shift in (0, 1, 5):
        chosen.copy_((chosen + shift) % 64)
        graph.replay()
        for mine, other in zip(astuple(found), astuple(Order.of(chosen, 64)), strict=True):
            assert torch.equal(mine, other)
