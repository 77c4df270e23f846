"""The dense layer of rows that are in 8 bits already, by a weight in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.choose import thresholds
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.quantized.in_8_bits import has_scales_of_rows, has_w8a8_kernel, takes_quantized_rows
from strata.kernels.linear.quantized.split_product import (
    SplitTile,
    split_product,
    split_product_kernel,
    split_tile,
    sums_bytes,
)
from strata.kernels.linear.quantized.w8a8_kernel import choose_tile, w8a8_kernel
from strata.kernels.op import CUBLAS, operation
from strata.kernels.quant.fp8 import library_product
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, product_of, spread, wide_scales
from strata.kernels.triton_import import HAS_TRITON, TensorDescriptor


class QuantizedCall(NamedTuple):
    """The operands of `quantized_linear`. values, scales: what `round_rows` made of x [rows, width] as the weight's
    scheme rounds activations. weight: [out, width], packed in the same kind of values; bias: [out] or None, of the
    dtype, x's."""

    values: Tensor
    scales: Tensor
    weight: QuantizedWeight
    bias: Tensor | None
    dtype: torch.dtype


def _cost(call: QuantizedCall, *, workload: Workload) -> Cost:
    values, scales, weight, bias, dtype = call
    (rows, width), out = values.shape, weight.shape[0]
    weights = weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(
        flops=2 * rows * width * out + (0 if bias is None else rows * out),
        read=values.nbytes + scales.nbytes + weights,
        written=rows * out * dtype.itemsize,
        weights=weights,
    )


def _meta(call: QuantizedCall) -> Tensor:
    return torch.empty((call.values.shape[0], call.weight.shape[0]), dtype=call.dtype, device="meta")


@operation(_cost, operands=QuantizedCall, meta=_meta, rowwise=True, dense=True)
def quantized_linear(call: QuantizedCall) -> Tensor:
    """What `linear` makes of x: -> [rows, out] of x's dtype."""
    values, scales, weight, bias, dtype = call
    groups = Scheme(weight.kind, 1, weight.columns if weight.activations == "block" else 0)
    rows = values.float() * spread(scales, groups, values.shape)
    return product_of(rows, weight, bias, dtype)


def by_library(call: QuantizedCall) -> Tensor:
    values, scales, weight, bias, dtype = call
    # Scales of rows, float32 [out, 1]; what is stored, where that is so.
    own = wide_scales(weight).expand(weight.shape[0], 1).contiguous()
    return library_product(values, scales, weight.values, own, dtype, True, bias)


def by_tiles(call: QuantizedCall) -> Tensor:
    """By the Triton kernel whose programs have whole rows of the weight."""
    values, scales, weight, bias, dtype = call
    out, width = weight.shape
    rows = values.shape[0]
    result = torch.empty((rows, out), dtype=dtype, device=values.device)
    processors = DeviceLimits.of(values.device).processors
    tile = choose_tile(rows, out, weight.columns > 0, processors)
    tiles = ceil_div(rows, tile.rows) * ceil_div(out, tile.columns)
    w8a8_kernel[(min(processors, tiles),)](
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


def by_split_k(call: QuantizedCall) -> Tensor:
    """By the Triton kernel whose programs may have parts of the width."""
    tile = _split_tile(call.values, call.weight)
    assert tile is not None
    return split_product(*call, tile)


def _split_tile(x: Tensor, weight: QuantizedWeight) -> SplitTile | None:
    out, width = weight.shape
    rows = x.numel() // width
    if weight.columns or not HAS_TRITON or rows > thresholds(x.device).split_rows:
        return None
    return split_tile(rows, out, width, DeviceLimits.of(x.device).processors)


def _divides(x: Tensor, weight: QuantizedWeight) -> bool:
    return _split_tile(x, weight) is not None


def _split_bytes(x: Tensor, weight: QuantizedWeight) -> int:
    tile = _split_tile(x, weight)
    assert tile is not None
    return sums_bytes(tile, x.numel() // weight.shape[1], weight.shape[0])


class QuantizedWay(NamedTuple):
    """One to run the operation. takes: rows, rounded or not, and a weight that `takes_quantized_rows`. scratch: bytes
    of what it holds while it runs."""

    name: str
    run: Callable[[QuantizedCall], Tensor]
    takes: Callable[[Tensor, QuantizedWeight], bool]
    kernel: Any
    scratch: Callable[[Tensor, QuantizedWeight], int] = lambda x, weight: 0

    def fits(self, x: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> bool:
        return (
            x.numel() > 0 and takes_quantized_rows(weight, dtype, DeviceLimits.of(x.device)) and self.takes(x, weight)
        )


# So few rows that the library, or tiles over the whole width, leave processors idle; int8 with scales of rows, or both
# kinds in blocks of columns; e4m3 with scales of rows, of which the library writes bfloat16 alone.
WAYS = (
    QuantizedWay("rounded, split", by_split_k, _divides, split_product_kernel, _split_bytes),
    QuantizedWay("rounded, triton", by_tiles, lambda x, weight: has_w8a8_kernel(weight), w8a8_kernel),
    QuantizedWay("rounded, cublas", by_library, lambda x, weight: has_scales_of_rows(weight), CUBLAS),
)


def _implement(way: QuantizedWay) -> None:
    def supports(call: QuantizedCall) -> bool:
        """Rows whose columns are as they come, which can be rounded where they are made."""
        return call.weight.order is None and way.fits(call.values, call.weight, call.dtype)

    quantized_linear.implement(way.name, "cuda", supports=supports, kernels=(way.kernel,), packed=True)(way.run)


for _way in WAYS:
    _implement(_way)
