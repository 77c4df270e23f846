"""The Triton kernels of packed weights in Triton's interpreter, against references: run by `test_interpreted`.

In float32, of 2:4 sparsity and of one row by int4 in float16: the interpreter computes nothing in bfloat16. It knows no
assembly; that of one row by int4 is run here by `assembly.run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime import interpreter

from strata.kernels.activation import quantized_silu_mul, silu_mul
from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits
from strata.kernels.linear import quantized_linear
from strata.kernels.linear.batch_invariant import InvariantTile
from strata.kernels.linear.quantized import many_rows
from strata.kernels.linear.quantized.split_product import SplitTile, split_product
from strata.kernels.linear.small_m import SmallMProduct, launch, multiply
from strata.kernels.linear.small_m_tiles import SmallMTile
from strata.kernels.norm.norm import launch_norm
from strata.kernels.quant import round_rows as round_rows_file
from strata.kernels.quant.dequantize import dequantize
from strata.kernels.quant.expand import expand_on_device
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, dense, pack, quantized_product
from strata.kernels.quant.round_rows import round_rows
from strata.kernels.quant.schemes import SPARSITIES
from strata.kernels.quant.two_of_four import smallest_two_of_four
from strata.kernels.triton_import import tl
from tests.kernels.linear import assembly

GEMV = SmallMTile("gemv", 32, 64, 4)
DOT = SmallMTile("dot", 32, 32, 2, rows=16)
WIDTH = 128
# Every kind, with the tiles that take it.
CASES: tuple[tuple[Scheme, tuple[SmallMTile, ...]], ...] = (
    (Scheme("int8", 1, 0, "row"), (replace(GEMV, width=256), DOT)),
    (Scheme("e4m3", 1, 0), (GEMV, replace(DOT, splits=2))),
    (Scheme("e4m3", 0, 0), (DOT,)),
    (Scheme("e4m3", 32, 64, "block"), (replace(DOT, splits=2, rows=2),)),
    (Scheme("int4", 1, 64), (replace(DOT, splits=2), replace(DOT, width=128))),
    (Scheme("int4", 1, 0), (DOT,)),
    (Scheme("e2m1", 1, 32), (replace(DOT, width=64),)),
    (Scheme("e2m1", 1, 16), (replace(DOT, width=64, splits=2),)),
)


def odd(weight: QuantizedWeight) -> QuantizedWeight:
    """With all that a weight may have: zeros, and columns in an order of their own."""
    zeros = torch.randint(0, 16, weight.scales.shape, dtype=torch.uint8)
    return weight._replace(zeros=zeros, order=torch.randperm(weight.shape[1]).int())


def close(found: Tensor, wanted: Tensor) -> None:
    rtol = 2e-5 if found.dtype == torch.float32 else 1e-3
    atol = rtol * wanted.nan_to_num().abs().max().item()
    torch.testing.assert_close(found.float(), wanted, rtol=rtol, atol=atol, equal_nan=True)


def few(weight: QuantizedWeight, tile: SmallMTile, dtype: torch.dtype = torch.float32) -> None:
    """Three rows, of which the last is NaN: it must not reach the others; all that a product may end in."""
    out, width = weight.shape
    x, bias, eps = torch.randn(3, 2 * width).to(dtype)[:, width:], torch.randn(out).to(dtype), 1e-5
    x[2] = torch.nan
    exact = x.float() @ dense(weight).t()
    residual, norm_weight, squares = torch.randn(3, out).to(dtype), torch.randn(out).to(dtype), torch.rand(3, 5)
    total, weighted, sums = multiply(SmallMProduct(x, weight, residual=residual, norm_weight=norm_weight), tile)
    close(total, exact + residual)
    torch.testing.assert_close(weighted, total * norm_weight, equal_nan=True, rtol=0, atol=0)
    rtol = 1e-4 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(sums.sum(1), total.float().square().sum(1), rtol=rtol, atol=0, equal_nan=True)
    (found,) = multiply(SmallMProduct(x, weight, bias, squares, eps, gated=True), tile)
    scaled = exact * torch.rsqrt(squares.sum(1, keepdim=True) / width + eps) + bias
    close(found, F.silu(scaled[:, : out // 2]) * scaled[:, out // 2 :])


def test_one_row_by_halves() -> None:
    """With and without zeros, groups of columns and rows, scales of rows; columns past the last one; edges of tiles."""
    x = torch.randn(1, 2 * 192)[:, 192:]
    residual, norm_weight, squares = torch.randn(1, 40), torch.randn(40), torch.rand(1, 5)
    tile = SmallMTile("gemv", 16, 256, 4)
    for rows, columns in ((1, 64), (1, 0), (8, 128), (0, 0)):
        packed = pack(torch.randn(40, 192) / 8, Scheme("int4", rows, columns))
        scaled_rows = [packed._replace(row_scales=torch.rand(40, 1))] if rows == 1 else []
        for weight in (packed, odd(packed), *scaled_rows):
            exact = x @ dense(weight).t()
            total, weighted, sums = multiply(SmallMProduct(x, weight, residual=residual, norm_weight=norm_weight), tile)
            close(total, exact + residual)
            close(weighted, total * norm_weight)
            close(sums.sum(1), total.square().sum(1))
            (found,) = multiply(SmallMProduct(x, weight, squares=squares, eps=1e-5, gated=True), tile)
            scaled = exact * torch.rsqrt(squares.sum(1, keepdim=True) / 192 + 1e-5)
            close(found, F.silu(scaled[:, :20]) * scaled[:, 20:])


def test_one_row_in_integers() -> None:
    """Exact where 16 bits hold 32 columns; else within what the kernel says, of numbers of any range; NaN stays NaN."""
    weight = pack(torch.randn(6, 192), Scheme("int4", 1, 64))
    units = torch.tensor([1, 2, 1, 0.5, -0.0, 1]).repeat_interleave(32)
    whole = torch.randint(-2047, 2048, (1, 192)) * torch.where(torch.rand(1, 192) < 0.5, 16.0, 1.0) * units
    mixed = torch.randn(1, 192) * 2.0 ** torch.randint(-20, 12, (1, 192))
    small = torch.randn(1, 192) * 2.0**-22
    for given in (weight, odd(weight)._replace(order=None)):
        unscaled = given._replace(scales=torch.ones_like(given.scales))
        assert torch.equal(_sums(whole.half(), unscaled).double(), whole.double() @ dense(unscaled).double().t())
        for x in (mixed.half(), small.half(), torch.zeros(1, 192).half()):
            wide, plain = x.double(), dense(given).double()
            largest = wide.abs().view(6, 32).amax(1).repeat_interleave(32)
            most = (plain.abs() * (2.0**-15 * largest + 1e-6 * wide.abs())).sum(1)
            assert ((_sums(x, given) - wide @ plain.t()).abs() <= most).all()
    for value in (torch.nan, torch.inf, -torch.inf):
        mixed[0, 100] = value
        assert _sums(mixed.half(), weight).isnan().all()


def _sums(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x [1, width] float16 times a weight in int4, not rounded to float16 at the end."""
    planned = launch(SmallMProduct(x, weight), SmallMTile("gemv", 4, 256, 1))
    result = torch.empty(1, weight.shape[0])
    args = tuple(result if one is planned.results[0] else one for one in planned.args)
    with mock.patch.object(interpreter.InterpreterBuilder, "create_inline_asm", _run_assembly):
        replace(planned, args=args, results=(result,)).run()
    return result


def _run_assembly(_: Any, text: str, constraints: str, operands: Sequence[Any], *__: Any) -> SimpleNamespace:
    """Element by element."""
    given = [operand.data.view(np.uint32) for operand in operands]
    results = constraints.count("=")
    found = np.empty((results, *given[0].shape), np.uint32)
    for place in np.ndindex(given[0].shape):
        first, *more = (int(operand[place]) for operand in given)
        found[(slice(None), *place)] = assembly.run(text, first, results, *more)
    made = [interpreter.TensorHandle(one.view(np.int32), tl.int32) for one in found]
    return SimpleNamespace(get_result=made.__getitem__)


def test_rounding() -> None:
    """Integers to the bit; of floats the interpreter itself rounds some otherwise than torch and the hardware."""
    x = torch.randn(3, 300)[:, :150] * torch.tensor([1.0, 1e-30, 0.0])[:, None]
    cases = (("int8", 0, None), ("int8", 128, None), ("e4m3", 0, None), ("e4m3", 64, None))
    for kind, columns, static in (*cases, ("int8", 0, 0.01), ("e4m3", 0, 0.01)):
        values, scales = many_rows._round(x, kind, columns, static)
        wanted, same = round_rows.reference(x, kind, columns, static)
        assert torch.equal(scales, same)
        assert (values.dtype, values.shape) == (wanted.dtype, wanted.shape)
        assert (values.float() != wanted.float()).float().mean() <= (0 if kind == "int8" else 0.05)
    x[1, 7] = torch.inf
    for static in (None, 0.01):
        values, scales = many_rows._round(x, "int8", 0, static)
        assert scales.isfinite().flatten().tolist() == [True, False, True]
    # A row that is too long for a tile is read twice.
    x = torch.randn(2, 2100)
    with mock.patch.object(round_rows_file, "MAX_COLUMNS", 1024), mock.patch.object(round_rows_file, "_COLUMNS", 1024):
        for static in (None, 0.01):
            identical(many_rows._round(x, "int8", 0, static), round_rows.reference(x, "int8", 0, static))


def test_rounding_where_rows_are_made() -> None:
    """To the bit what the kernels make one after the other."""
    gate, up = torch.randn(5, 2 * 150).split(150, 1)
    weight = torch.randn(150)
    for kind, columns, static in (("int8", 0, None), ("int8", 64, None), ("e4m3", 0, None), ("e4m3", 0, 0.01)):
        rounding = {"rounding": (kind, columns, static)}
        total, normed = launch_norm(gate, weight, 1e-5, up)
        rounded = many_rows._round(normed, kind, columns, static)
        identical(launch_norm(gate, weight, 1e-5, up, **rounding), (total, *rounded, normed))
        identical(launch_norm(total, weight, 1e-5, **rounding, keeps=False), rounded)
        (wide,) = launch_norm(total, weight, 1e-5, offset=1.0)
        found = launch_norm(total, weight, 1e-5, offset=1.0, **rounding)
        identical(found, (*many_rows._round(wide, kind, columns, static), wide))
        gated = many_rows._round(silu_mul.by_rows(silu_mul.silu_mul_kernel, gate, up), kind, columns, static)
        identical(quantized_silu_mul._triton(gate, up, kind, columns, static), gated)


def identical(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.float(), other.float())


def test_two_of_four() -> None:
    """Also a matrix of fours with one value or none; tiles of one part of the columns and of two."""
    matrix = torch.randn(40, 2 * WIDTH) / 8
    matrix.masked_fill_(smallest_two_of_four(matrix.abs()), 0.0)[3, 5:30] = 0
    weight = pack(matrix.half(), SPARSITIES["2:4"])
    assert torch.equal(expand_on_device(weight), matrix.half())
    few(weight, replace(DOT, width=128), torch.float16)
    few(weight, replace(DOT, width=128, splits=2, rows=2), torch.float16)


def test_products() -> None:
    """Several tiles of rows and columns, with edges; x rounded by the reference, see `rounding`."""
    x, bias = torch.randn(65, 256), torch.randn(80)
    small = InvariantTile(64, 64, 4, 2, 128)
    hopper = DeviceLimits("any", (9, 0), SHARED_BYTES, 3)
    for scheme in (Scheme("int8", 1, 0, "row"), Scheme("int8", 16, 128, "block"), Scheme("e4m3", 128, 128, "block")):
        weight = pack(torch.randn(80, 256), scheme)
        with (
            mock.patch.object(quantized_linear, "choose_tile", return_value=small),
            mock.patch.object(many_rows, "_round", round_rows.reference),
            mock.patch.object(DeviceLimits, "of", return_value=hopper),
        ):
            found = quantized_linear.by_tiles(many_rows.quantized_call(x, weight, bias))
        wanted = quantized_product(x, weight, bias)
        close(found, wanted)


def test_split_products() -> None:
    """Several tiles of rows and columns, with edges, of one piece and of two or three."""
    x, bias = torch.randn(150, 256), torch.randn(200)
    one, divided = SplitTile(64, 64, 1, 4), SplitTile(64, 64, 2, 4)
    tall, wide = replace(divided, rows=96), replace(divided, columns=112)
    for scheme, tiles in (
        (Scheme("int8", 1, 0, "row"), (one, divided, tall, wide, replace(wide, splits=1))),
        (Scheme("e4m3", 1, 0, "row"), (divided, replace(tall, splits=1), replace(wide, columns=96))),
        (Scheme("e4m3", 0, 0, "row"), (one, tall, wide, SplitTile(256, 128, 2, 8))),
    ):
        weight = pack(torch.randn(200, 256), scheme)
        values, scales = round_rows.reference(x, weight.kind, 0)
        wanted = quantized_product(x, weight, bias)
        for tile in tiles:
            close(split_product(values, scales, weight, bias, torch.float32, tile), wanted)


@pytest.mark.parametrize(("scheme", "tiles"), CASES, ids=str)
def test_few_rows_of_every_kind(scheme: Scheme, tiles: tuple[SmallMTile, ...]) -> None:
    packed = pack(torch.randn(40, WIDTH) / 8, scheme)
    for weight in (packed, odd(packed)) if scheme.values == "int4" else (packed,):
        assert torch.equal(dequantize(weight, torch.float32), dense(weight._replace(order=None)))
        for tile in tiles:
            few(weight, tile)
