"""The short convolution: equal to transformers', in pieces, in any company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn

from strata.hardware.roofline import Cost, Workload
from strata.kernels.recurrent.short_convolution import short_convolution
from strata.kernels.state.fixed import FixedStates

from .steps import HERE, in_pieces, pool, step

CHANNELS = 11
RUNS = {
    "reference": short_convolution.reference,
    "gradients": short_convolution.bind("cpu", differentiable=True),
    "exact": short_convolution.bind("cpu", deterministic=True),
}


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: list[int], silu: bool) -> Tensor:
    """As transformers computes it, each sequence on its own, in float64."""
    wide = None if bias is None else bias.double()
    parts = [
        causal_conv1d_fn(one.T[None].double(), weight[:, 0].double(), wide, "silu" if silu else None)[0].T
        for one in x.split(lengths)
        if len(one)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize(("width", "silu", "biased"), [(4, True, True), (3, False, True), (2, True, False)])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_whole_sequences_and_pieces_equal_transformers(run: Any, width: int, silu: bool, biased: bool) -> None:
    x, weight = torch.randn(40, CHANNELS), torch.randn(CHANNELS, 1, width)
    bias = torch.randn(CHANNELS) if biased else None
    whole = run(x, weight, bias, step([28, 0, 1, 11]), 0, silu)
    assert (whole - oracle(x, weight, bias, [28, 1, 11], silu)).abs().max() < 1e-5
    states = pool(5, ((CHANNELS, width - 1), torch.float32))
    cuts = [(20, 0, 1), (1, 1, 2), (1, 0, 1), (6, 0, 7)]
    found, slots = in_pieces(run, [x], [weight, bias, HERE, 0, silu], [28, 1, 11], states, cuts)
    assert (found - whole).abs().max() < 1e-5
    (tails,) = states.tensors[0]
    ends = {0: x[28 - width + 1 : 28], 1: F.pad(x[28:29], (0, 0, width - 2, 0)), 2: x[40 - width + 1 :]}
    for number, wanted in ends.items():
        assert torch.equal(tails[slots[number]], wanted.T)
    assert tails[[0, 4]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_depend_neither_on_company_nor_on_pieces(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(300, 64).to(dtype), torch.randn(64, 1, 4).to(dtype), torch.randn(64).to(dtype)
    run = RUNS["exact"]
    whole = run(x, weight, bias, step([103, 1, 196]), 0, True)
    assert torch.equal(run(x[104:], weight, bias, step([196]), 0, True), whole[104:])
    states = pool(4, ((64, 3), dtype))
    cuts = [(100, 1, 17), (2, 0, 1), (0, 0, 1), (1, 0, 177)]
    found, _ = in_pieces(run, [x], [weight, bias, HERE, 0, True], [103, 1, 196], states, cuts)
    assert torch.equal(found, whole)
    exact = oracle(x, weight, bias, [103, 1, 196], True)
    assert ((whole - exact).abs() <= exact.abs() / (200 if dtype == torch.bfloat16 else 1e5) + 1e-3).all()


def test_gradients_are_those_of_finite_differences() -> None:
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 3), (3, 1, 4), (3,))]
    assert torch.autograd.gradcheck(lambda *args: short_convolution(*args, step([4, 2]), 0, True), given)


def test_costs_are_the_hand_counts() -> None:
    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    x, weight, bias = meta(7, 64), meta(64, 1, 4), meta(64)
    found = short_convolution.cost(x, weight, bias, step([7]), 0, True, workload=Workload((7,), (7,)))
    assert found == Cost(7 * 64 * (8 + 4), 896 + 512 + 128, 896, 512 + 128)
    found = short_convolution.cost(x, weight, None, step([7]), 0, False, workload=Workload((7,), (7,)))
    assert found == Cost(7 * 64 * 7, 896 + 512, 896, 512)
    states = FixedStates(((meta(9, 64, 3),),), meta(2))
    workload = Workload((6, 1, 0), (6, 4, 5))
    found = short_convolution.cost(x, weight, None, step([6, 1, 0], None, states), 0, False, workload=workload)
    assert found == Cost(7 * 64 * 7, 896 + 512 + 384, 896 + 2 * 384, 512, 3 * 384)
