"""Matrices in 8-bit floating point with scales, and their products (Micikevicius et al. 2022).

They are packed weights (`QuantizedWeight`) of which a scale belongs to the whole or to each row. Tensor cores of Hopper
want both operands with the summed dimension last, and training sums over each dimension of a matrix once, so that it is
packed both ways.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.quant.quantized import E5M2, QuantizedWeight, Scheme
from strata.kernels.triton_import import jit, tl

# Scales are finite for matrices of zeros, too.
LEAST = 1e-12
# cuBLAS takes summed dimensions and rows of the second operand in multiples of this.
ALIGNMENT = 16

KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: E5M2}

Quantized = tuple[Tensor, Tensor, Tensor, Tensor]


def _quantize_cost(x: Tensor, dtype: torch.dtype, per_row: bool, *, workload: Workload) -> Cost:
    scales = sum(x.shape) if per_row else 1
    # The largest magnitude, then a multiplication (two with two scales).
    return Cost((4 if per_row else 3) * x.numel(), x.nbytes, 2 * x.numel() + 4 * scales)


def _quantize_meta(x: Tensor, dtype: torch.dtype, per_row: bool) -> Quantized:
    return _empty(x, dtype, per_row, torch.device("meta"))


def _empty(x: Tensor, dtype: torch.dtype, per_row: bool, device: torch.device) -> Quantized:
    """Memory for the results of `quantize`."""
    (rows, columns), scales = x.shape, x.shape if per_row else (1, 1)
    values, turned = (torch.empty(size, dtype=dtype, device=device) for size in (x.shape, (columns, padded(rows))))
    row_scale, column_scale = (torch.empty(count, 1, dtype=torch.float32, device=device) for count in scales)
    return values, turned, row_scale, column_scale


@operation(_quantize_cost, meta=_quantize_meta)
def quantize(x: Tensor, dtype: torch.dtype, per_row: bool) -> Quantized:
    """x in 8 bits as it is and transposed, each as values and what they have to be multiplied by.

    x [rows, columns] -> values [rows, columns], turned [columns, rows up to a multiple of 16, zeros there], both of
    `dtype` (an 8-bit floating type); scales float32 [rows, 1] and [columns, 1], or [1, 1] unless per_row. The largest
    magnitude that a scale serves becomes the largest of the type; nothing overflows.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    values, row_scale = _scaled(wide, dtype, per_row)
    turned, column_scale = _scaled(F.pad(wide.t(), (0, padded(len(x)) - len(x))), dtype, per_row)
    return values, turned, row_scale, column_scale


def _scaled(x: Tensor, dtype: torch.dtype, per_row: bool) -> tuple[Tensor, Tensor]:
    most = torch.finfo(dtype).max
    largest = x.abs().amax(1, keepdim=True) if per_row else x.abs().amax().view(1, 1)
    top = largest.clamp(min=LEAST)
    # A quotient with a number would be a product with a reciprocal, rounded twice (of a tensor by a number, on CUDA).
    wide = torch.full_like(top, most)
    return (x * (wide / top)).clamp(-most, most).to(dtype), (top / wide).float()


def pack_both_ways(x: Tensor, dtype: torch.dtype, per_row: bool) -> tuple[QuantizedWeight, QuantizedWeight]:
    """x and its transpose, as `quantize` rounds them."""
    values, turned, scale, turned_scale = quantize(x, dtype, per_row)
    scheme = scheme_of_scales(dtype, per_row)
    return QuantizedWeight.of(scheme, values, scale), QuantizedWeight.of(scheme, turned, turned_scale)


def scheme_of_scales(dtype: torch.dtype, per_row: bool) -> Scheme:
    """Of values of an 8-bit floating type."""
    return Scheme(KINDS[dtype], 1 if per_row else 0, 0)


def padded(rows: int) -> int:
    """Rows up to the next multiple that products can sum over."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


@jit
def largest_kernel(x, of_rows, of_columns, rows, columns, stride, PER_ROW: tl.constexpr, TILE: tl.constexpr):
    """Programs [rows / TILE, columns / TILE] raise what `of_rows` and `of_columns` hold (or the one in `of_rows`)."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row.to(tl.int64)[:, None] * stride + column[None, :]
    size = tl.abs(tl.load(x + offset, mask=held, other=0.0).to(tl.float32))
    if PER_ROW:
        tl.atomic_max(of_rows + row, tl.max(size, 1), mask=row < rows, sem="relaxed")
        tl.atomic_max(of_columns + column, tl.max(size, 0), mask=column < columns, sem="relaxed")
    else:
        tl.atomic_max(of_rows, tl.max(size), sem="relaxed")


@jit
def quantize_kernel(
    x,
    values,
    turned,
    of_rows,
    of_columns,
    row_scale,
    column_scale,
    rows,
    columns,
    stride,
    turned_stride,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
    PER_ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    """Programs [turned_stride / TILE, columns / TILE]; those at the edges store the scales.

    Divisions are rounded as the reference rounds them: a value half way between two others must go the same way.
    """
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    held = (row < rows)[:, None] & (column < columns)[None, :]
    wide_row = row.to(tl.int64)
    given = tl.load(x + wide_row[:, None] * stride + column[None, :], mask=held, other=0.0).to(tl.float32)
    if PER_ROW:
        row_top = tl.maximum(tl.load(of_rows + row, mask=row < rows, other=1.0), LEAST)
        column_top = tl.maximum(tl.load(of_columns + column, mask=column < columns, other=1.0), LEAST)
        straight = given * tl.div_rn(MOST, row_top)[:, None]
        other = given * tl.div_rn(MOST, column_top)[None, :]
        if tl.program_id(1) == 0:
            tl.store(row_scale + row, tl.div_rn(row_top, MOST), mask=row < rows)
        if tl.program_id(0) == 0:
            tl.store(column_scale + column, tl.div_rn(column_top, MOST), mask=column < columns)
    else:
        top = tl.maximum(tl.load(of_rows), LEAST)
        straight = given * tl.div_rn(MOST, top)
        other = straight
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(row_scale, tl.div_rn(top, MOST))
    # NaN stays NaN, so that a run sees it.
    straight = tl.clamp(straight, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    other = tl.clamp(other, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    kind = values.dtype.element_ty
    tl.store(values + wide_row[:, None] * columns + column[None, :], straight.to(kind), mask=held)
    offset = column.to(tl.int64)[:, None] * turned_stride + row[None, :]
    kept = (column < columns)[:, None] & (row < turned_stride)[None, :]
    tl.store(turned + offset, tl.trans(other.to(kind)), mask=kept)


_TILE = 128
_WARPS = 8


def _triton(x: Tensor, dtype: torch.dtype, per_row: bool) -> Quantized:
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    counts = (rows, columns) if per_row else (1, 1)
    of_rows, of_columns = torch.zeros(sum(counts), dtype=torch.float32, device=x.device).split(counts)
    values, turned, row_scale, column_scale = _empty(x, dtype, per_row, x.device)
    grid = (ceil_div(padded(rows), _TILE), ceil_div(columns, _TILE))
    known = {"PER_ROW": per_row, "TILE": _TILE, "num_warps": _WARPS}
    largest_kernel[grid](x, of_rows, of_columns, rows, columns, x.stride(0), **known)
    tensors = (x, values, turned, of_rows, of_columns, row_scale, column_scale)
    sizes = (rows, columns, x.stride(0), turned.stride(0))
    quantize_kernel[grid](*tensors, *sizes, MOST=torch.finfo(dtype).max, LEAST=LEAST, **known)
    return values, turned, row_scale, column_scale if per_row else row_scale


quantize.in_triton(_triton, supports=lambda x, *_: x.numel() > 0)


def _product_cost(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool, *, workload: Workload
) -> Cost:
    read = a.nbytes + b.nbytes + a_scale.nbytes + b_scale.nbytes
    return Cost(2 * a.numel() * b.shape[0], read, a.shape[0] * b.shape[0] * dtype.itemsize)


def _product_meta(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype, device="meta")


@operation(_product_cost, meta=_product_meta)
def scaled_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """`(a * a_scale) @ (b * b_scale)^T`: a [rows, width], b [columns, width] -> [rows, columns] of `dtype`.

    a and b are 8-bit floating types, one of them float8_e4m3fn; scales float32, both [1, 1] or [rows, 1] and
    [columns, 1] (then both operands are e4m3). fast: sums may keep fewer bits than float32 (Hopper's tensor cores).
    """
    return F.linear(a.float() * a_scale, b.float() * b_scale).to(dtype)


def library_product(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`scaled_product` by the library, plus a bias [columns] of `dtype`; written to `out`, if that is given."""
    scales = {"scale_a": a_scale, "scale_b": b_scale.t()}
    return torch._scaled_mm(a, b.t(), **scales, bias=bias, out_dtype=dtype, use_fast_accum=fast, out=out)


scaled_product.implement("cublas", "cuda")(library_product)


def multiply(a: QuantizedWeight, b: QuantizedWeight, dtype: torch.dtype, fast: bool) -> Tensor:
    """`a @ b^T` of what they stand for: `scaled_product` of their values and scales."""
    product: Tensor = scaled_product(a.values, a.scales, b.values, b.scales, dtype, fast)
    return product


def put_product(memory: Tensor, a: QuantizedWeight, b: QuantizedWeight, dtype: torch.dtype) -> None:
    """`multiply`, every sum in float32, into contiguous memory [rows, columns] of float32 or of `dtype`.

    What the library cannot write as float32 (scales of rows) is rounded to `dtype` on the way.
    """
    if memory.is_cuda and a.scales.numel() == b.scales.numel() == 1:
        library_product(a.values, a.scales, b.values, b.scales, memory.dtype, False, out=memory)
    else:
        memory.copy_(multiply(a, b, dtype, False))
