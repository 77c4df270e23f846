"""Products of many rows with a packed weight (prompts, large batches), for which arithmetic counts.

Where the scheme rounds activations, both operands stay in 8 bits; else the weight becomes floats, in a buffer of its
size, and the product is the library's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear import fixed
from strata.kernels.linear.packed.few_rows import ordered
from strata.kernels.linear.packed.in_8_bits import has_rounded_kernel, has_scales_of_rows, in_8_bits, multiplies_rounded
from strata.kernels.linear.packed.rounded_kernel import choose_tile, rounded_product_kernel
from strata.kernels.linear.packed.split_product import (
    SplitTile,
    split_product,
    split_product_kernel,
    split_tile,
    sums_bytes,
)
from strata.kernels.op import ATEN, CUBLAS
from strata.kernels.quant.dequantize import can_dequantize, dequantize, dequantize_kernel
from strata.kernels.quant.fp8 import library_product
from strata.kernels.quant.packed import PackedWeight, dense, wide_scales
from strata.kernels.quant.round_rows import round_rows, round_rows_kernel
from strata.kernels.triton_import import HAS_TRITON

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

_round = round_rows.bind("cuda")


class RoundedCall(NamedTuple):
    """The operands of `rounded_linear`. values, scales: what `round_rows` made of x [rows, width] as the weight's
    scheme rounds activations. weight: [out, width], packed in the same kind of values; bias: [out] or None, of the
    dtype, x's."""

    values: Tensor
    scales: Tensor
    weight: PackedWeight
    bias: Tensor | None
    dtype: torch.dtype


def fits_scaled_mm(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    """e4m3 with scales of rows, and activations likewise; the library writes bfloat16 alone for these."""
    return has_scales_of_rows(weight) and x.numel() > 0 and in_8_bits(x.dtype, weight, DeviceLimits.of(x.device))


def scaled_mm(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    values, scales = _round(_rows_of(x, weight), weight.kind, 0, weight.input_scale)
    return scaled_mm_of_rounded(RoundedCall(values, scales, weight, bias, x.dtype)).view(*x.shape[:-1], weight.shape[0])


def scaled_mm_of_rounded(call: RoundedCall) -> Tensor:
    """`rounded_linear` by the library."""
    values, scales, weight, bias, dtype = call
    # Scales of rows, float32 [out, 1]; what is stored, where that is so.
    own = wide_scales(weight).expand(weight.shape[0], 1).contiguous()
    return library_product(values, scales, weight.values, own, dtype, True, bias)


def fits_rounded(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    """int8 with scales of rows, or both kinds in blocks of columns, activations likewise."""
    return has_rounded_kernel(weight) and x.numel() > 0 and in_8_bits(x.dtype, weight, DeviceLimits.of(x.device))


def rounded_product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    values, scales = _round(_rows_of(x, weight), weight.kind, weight.columns, weight.input_scale)
    return product_of_rounded(RoundedCall(values, scales, weight, bias, x.dtype)).view(*x.shape[:-1], weight.shape[0])


def product_of_rounded(call: RoundedCall) -> Tensor:
    """`rounded_linear` by the Triton kernel."""
    values, scales, weight, bias, dtype = call
    out, width = weight.shape
    rows = values.shape[0]
    result = torch.empty((rows, out), dtype=dtype, device=values.device)
    processors = DeviceLimits.of(values.device).processors
    tile = choose_tile(rows, out, weight.columns > 0, processors)
    tiles = ceil_div(rows, tile.rows) * ceil_div(out, tile.columns)
    rounded_product_kernel[(min(processors, tiles),)](
        TensorDescriptor.from_tensor(values, [tile.rows, tile.width]),
        TensorDescriptor.from_tensor(weight.values, [tile.columns, tile.width]),
        scales,
        weight.scales,
        weight.row_scales,
        bias,
        TensorDescriptor.from_tensor(result, [tile.rows, tile.columns]),
        rows,
        out,
        width,
        scales.shape[1],
        weight.scales.stride(0),
        ROW_GROUP=weight.rows,
        GROUP=weight.columns,
        **tile.constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return result


def fits_split(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    """So few rows that the library, or tiles over the whole width, leave processors idle."""
    return (fits_scaled_mm(x, weight) or fits_rounded(x, weight)) and _split_tile(x, weight) is not None


def split(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    values, scales = _round(_rows_of(x, weight), weight.kind, 0, weight.input_scale)
    return split_of_rounded(RoundedCall(values, scales, weight, bias, x.dtype)).view(*x.shape[:-1], weight.shape[0])


def split_of_rounded(call: RoundedCall) -> Tensor:
    """`rounded_linear` by the Triton kernel whose programs may have parts of the width."""
    tile = _split_tile(call.values, call.weight)
    assert tile is not None
    return split_product(*call, tile)


def _split_tile(x: Tensor, weight: PackedWeight) -> SplitTile | None:
    out, width = weight.shape
    if weight.columns or not HAS_TRITON:
        return None
    return split_tile(x.numel() // width, out, width, DeviceLimits.of(x.device).processors)


def fits_split_of_rounded(call: RoundedCall) -> bool:
    return _fits_of_rounded(call) and _split_tile(call.values, call.weight) is not None


def fits_scaled_mm_of_rounded(call: RoundedCall) -> bool:
    return has_scales_of_rows(call.weight) and _fits_of_rounded(call)


def fits_product_of_rounded(call: RoundedCall) -> bool:
    return has_rounded_kernel(call.weight) and _fits_of_rounded(call)


def _fits_of_rounded(call: RoundedCall) -> bool:
    values = call.values
    return values.numel() > 0 and multiplies_rounded(call.weight, call.dtype, DeviceLimits.of(values.device))


def fits_dequantized(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    return can_dequantize(weight)


def dequantized(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x is not rounded, whatever the scheme says."""
    return F.linear(ordered(x, weight), dequantize(weight, x.dtype), bias)


def fits_fixed_tiles(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> bool:
    return can_dequantize(weight) and x.dtype != torch.float64 and x.stride(-1) == 1


def fixed_tiles(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x is not rounded; however many rows there are, a row has the same bits."""
    return fixed.triton_linear(ordered(x, weight), dequantize(weight, x.dtype), bias)


def unpacked(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """What any device can: the weight in floats by torch, x not rounded."""
    return F.linear(x, dense(weight, x.dtype), bias)


def _rows_of(x: Tensor, weight: PackedWeight) -> Tensor:
    rows = ordered(x.reshape(-1, x.shape[-1]), weight)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _with_order(*kernels: Any) -> Any:
    def launched(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> tuple[Any, ...]:
        return kernels if weight.order is None else (ATEN, *kernels)

    return launched


def rounded_bytes(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> int:
    """Of rows in the order of the weight, of them in 8 bits, and of their scales and the weight's, in float32."""
    out, width = weight.shape
    copy, rows = 0 if weight.order is None else x.nbytes, x.numel() // width
    return copy + x.numel() + 4 * (rows * (ceil_div(width, weight.columns) if weight.columns else 1) + out)


def split_bytes(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> int:
    """`rounded_bytes`, and the sums of parts of the width."""
    tile = _split_tile(x, weight)
    assert tile is not None
    return rounded_bytes(x, weight) + sums_bytes(tile, x.numel() // weight.shape[1], weight.shape[0])


def dequantized_bytes(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> int:
    """Of the weight in floats, and rows in its order."""
    return weight.shape[0] * weight.shape[1] * x.element_size() + (0 if weight.order is None else x.nbytes)


SPLIT_KERNELS = _with_order(round_rows_kernel, split_product_kernel)
SCALED_MM_KERNELS = _with_order(round_rows_kernel, CUBLAS)
ROUNDED_KERNELS = _with_order(round_rows_kernel, rounded_product_kernel)
DEQUANTIZED_KERNELS = _with_order(dequantize_kernel, CUBLAS)
FIXED_KERNELS = _with_order(dequantize_kernel, fixed.linear_kernel)
