"""Matrices and dense layers in 8 bits on the CPU: every element within what rounding allows, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.fp8 import linear_fp8, linear_silu_mul_fp8
from strata.kernels.linear.quantized import many_rows
from strata.kernels.linear.quantized_linear import by_library
from strata.kernels.quant.fp8 import library_product, multiply, pack_both_ways, padded, quantize, scaled_product
from strata.kernels.quant.quantized import dense, pack, quantized_product
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SCHEMES

WORK = Workload((7,), (7,))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Half a unit in the last place, and half the smallest number, of each type (Micikevicius et al. 2022, table 1).
HALF_UNIT = {E4M3: 2**-4, E5M2: 2**-3}
HALF_LEAST = {E4M3: 2**-10, E5M2: 2**-17}
MOST = {E4M3: 448.0, E5M2: 57344.0}


def spread(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Values over many powers of two, as gradients have them."""
    return (torch.randn(*shape) * torch.exp(2 * torch.randn(*shape))).to(dtype)


def rounding(x: Tensor, kind: torch.dtype, dim: int | None) -> Tensor:
    """The error that each element of x may have after rounding with scales along `dim` (None: one scale)."""
    size = x.double().abs()
    scale = (size.amax() if dim is None else size.amax(dim, keepdim=True)) / MOST[kind]
    return torch.maximum(size * HALF_UNIT[kind], scale * HALF_LEAST[kind]) * 1.001


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(5, 48), (33, 20), (16, 16)])
def test_both_ways_hold_the_matrix_within_rounding(shape: tuple[int, int], kind: torch.dtype, per_row: bool) -> None:
    x = spread(*shape)
    x[1] = 0
    values, turned, row_scale, column_scale = quantize(x, kind, per_row)
    rows, columns = shape
    assert (values.shape, turned.shape) == ((rows, columns), (columns, padded(rows)))
    assert row_scale.shape == ((rows, 1) if per_row else (1, 1))
    assert column_scale.shape == ((columns, 1) if per_row else (1, 1))
    straight, back = values.double() * row_scale, (turned.double() * column_scale)[:, :rows].t()
    for found, dim in ((straight, 1), (back, 0)):
        assert ((found - x.double()).abs() <= rounding(x, kind, dim if per_row else None)).all()
    assert not turned.double()[:, rows:].any()
    assert values.double().abs().max() == MOST[kind]


def test_factors_are_rounded_once() -> None:
    """448 times the reciprocal is rounded twice: for a top of 1.53125 it rounds 6 of these 129 values another way."""
    tops = torch.arange(128, 256)[:, None] / 128
    x = torch.cat((tops, torch.arange(128, 256).repeat(128, 1) / 256), 1)
    wanted = torch.from_numpy(x.numpy() * (np.float32(448) / tops.numpy())).to(E4M3)
    assert torch.equal(quantize(x, E4M3, True)[0].view(torch.uint8), wanted.view(torch.uint8))


def test_nan_stays_and_infinity_is_no_number() -> None:
    x = torch.ones(4, 16)
    x[0, 0], x[2, 3] = torch.nan, torch.inf
    values = quantize(x, E4M3, True)[0].float()
    assert values[0].isnan().all()
    assert values[2, 3].isnan()
    assert values[1].isfinite().all()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("tokens", [1, 40, 48])
def test_layer_and_gradients_are_within_rounding_of_the_operands(tokens: int, per_row: bool) -> None:
    x, weight, upstream = spread(tokens, 32), spread(64, 32), spread(tokens, 64)
    x.requires_grad_()
    weight.requires_grad_()
    result = linear_fp8(x, weight, None, per_row)
    result.backward(upstream)
    kind = E4M3 if per_row else E5M2
    for found, left, left_kind, right in (
        (result, x, E4M3, weight),
        (x.grad, upstream, kind, weight.t()),
        (weight.grad, upstream.t(), kind, x.t()),
    ):
        a, b = left.detach().double(), right.detach().double()
        dim = 1 if per_row else None
        of_a, of_b = rounding(a, left_kind, dim), rounding(b, E4M3, dim)
        allowed = a.abs() @ of_b.t() + of_a @ b.abs().t() + of_a @ of_b.t()
        exact = a @ b.t()
        error = (found.double() - exact).abs()
        assert found.dtype == torch.bfloat16
        assert (error <= allowed + 2**-8 * (exact.abs() + allowed)).all()  # and bfloat16's rounding of the result
        assert tokens == 1 or (error > 2**-7 * exact.abs()).any(), "no product of 8 bits is this exact"


def test_scales_of_rows_serve_rows_of_unequal_size() -> None:
    x, weight = torch.randn(16, 64) * torch.logspace(0, -8, 16)[:, None], torch.randn(32, 64)
    exact = x @ weight.t()

    def worst(per_row: bool) -> float:
        error = (linear_fp8(x, weight, None, per_row) - exact).norm(dim=1)
        return (error / exact.norm(dim=1)).max().item()

    assert worst(True) < 0.1 < worst(False)


def test_bias_and_gating() -> None:
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((24, 32), (96, 32), (96,)))
    gated = linear_silu_mul_fp8(x, weight, bias, True)
    gate, up = (x @ weight.t() + bias).chunk(2, -1)
    wanted = torch.nn.functional.silu(gate) * up
    assert gated.shape == (24, 48)
    assert (gated - wanted).norm() < 0.08 * wanted.norm()
    upstream = torch.randn(24, 48, dtype=torch.float64)
    leaves = (x, weight, bias)
    found = torch.autograd.grad(gated, leaves, upstream)
    for mine, exact in zip(found, torch.autograd.grad(wanted, leaves, upstream), strict=True):
        assert (mine - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_both_ways_are_packed_weights(kind: torch.dtype, per_row: bool) -> None:
    x, other = spread(20, 48), spread(32, 48)
    (straight, turned), (weight, _) = pack_both_ways(x, kind, per_row), pack_both_ways(other, E4M3, per_row)
    values, back, row_scale, column_scale = quantize(x, kind, per_row)
    assert torch.equal(dense(straight), values.float() * row_scale)
    assert torch.equal(dense(turned), back.float() * column_scale)
    exact = dense(straight, torch.float64) @ dense(weight, torch.float64).t()
    assert torch.allclose(multiply(straight, weight, torch.float32, False).double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 1])
def test_the_library_is_called_as_it_wants(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values as they lie, the second operand by columns, scales of rows [rows, 1] and [1, columns] without gaps."""
    calls = []

    def library(a: Tensor, b: Tensor, **given: Any) -> Tensor:
        calls.append((a, b, given))
        return (a.float() * given["scale_a"] @ (b.float() * given["scale_b"])).to(given["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", library)
    monkeypatch.setattr(many_rows, "_round", round_rows.reference)
    x, bias = spread(24, 32), torch.zeros(48, dtype=torch.bfloat16)
    weight = pack(spread(48, 32), SCHEMES["fp8"]._replace(rows=rows))
    product = by_library(many_rows.quantized_call(x, weight, bias))
    torch.testing.assert_close(product, quantized_product(x, weight, bias))
    a, b, given = calls[0]
    assert (a.shape, b.shape, b.stride()) == ((24, 32), (32, 48), (1, 32))
    assert b.data_ptr() == weight.values.data_ptr()
    assert (given["scale_a"].shape, given["scale_b"].shape) == ((24, 1), (1, 48))
    assert given["scale_b"].is_contiguous()
    assert (given["use_fast_accum"], given["bias"], given["out_dtype"]) == (True, bias, torch.bfloat16)
    if rows == 1:
        assert given["scale_b"].data_ptr() == weight.scales.data_ptr()
    memory = torch.empty(2, 2)
    one = torch.ones(1, 1)
    library_product(weight.values, one, weight.values, one, torch.float32, False, out=memory)
    given = calls[1][2]
    assert (given["out"] is memory, given["use_fast_accum"], given["bias"]) == (True, False, None)
    assert given["scale_a"].shape == given["scale_b"].shape == (1, 1)


def test_costs_are_the_hand_counts() -> None:
    x, weight = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((7, 32), (48, 32)))
    assert quantize.cost(x, E4M3, False, workload=WORK) == Cost(3 * 224, 448, 448 + 4)
    assert quantize.cost(x, E4M3, True, workload=WORK) == Cost(4 * 224, 448, 448 + 4 * 39)
    shapes = [tuple(one.shape) for one in quantize.meta(x, E4M3, True)]
    assert shapes == [(7, 32), (32, 16), (7, 1), (32, 1)]
    a, b = (torch.empty(s, dtype=E4M3, device="meta") for s in ((7, 32), (48, 32)))
    scale = torch.empty(1, 1, device="meta")
    cost = scaled_product.cost(a, scale, b, scale, torch.bfloat16, True, workload=WORK)
    assert cost == Cost(2 * 7 * 32 * 48, 7 * 32 + 48 * 32 + 8, 7 * 48 * 2)
    layer = linear_fp8.cost(x, weight, None, True, workload=WORK)
    assert layer == Cost(2 * 7 * 32 * 48 + 3 * (224 + 1536), 448 + 3072, 672, 3072)
    gated = linear_silu_mul_fp8.cost(x, weight, None, True, workload=WORK)
    assert gated == Cost(2 * 7 * 32 * 48 + 5 * 7 * 24 + 3 * (224 + 1536), 448 + 3072, 336, 3072)
    assert linear_silu_mul_fp8.meta(x, weight, None, True).shape == (7, 24)
