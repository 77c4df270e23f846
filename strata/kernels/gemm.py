"""The dense layer: `x @ weight^T + bias`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, workload: Workload) -> Cost:
    out, width = weight.shape
    rows = x.numel() // width
    weights = weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(
        flops=2 * rows * width * out + (0 if bias is None else rows * out),
        read=x.nbytes + weights,
        written=rows * out * x.element_size(),
        weights=weights,
    )


def _meta(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), device="meta")


@operation(_cost, meta=_meta)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`: x [..., width], weight [out, width], bias [out] or None -> [..., out]; one dtype."""
    return F.linear(x, weight, bias)


linear.implement("torch", "cpu", differentiable=True)(F.linear)


@linear.implement("fixed tiles", "cpu", invariant=True)
def _fixed_tiles(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product in tiles of a fixed number of rows, so that the library never learns how many rows there are.

    Libraries choose their kernel, and with it the order of the sum, by the shape and the alignment of the operands.
    Here every call has the same shape, and the rows lie in the same aligned buffer. Stale rows of the buffer cannot
    reach the others: a row of a product depends on one row of its left operand.
    """
    out, width = weight.shape
    rows = x.reshape(-1, width)
    tile = _tile_rows(weight)
    result = x.new_empty((rows.shape[0], out))
    buffer = x.new_zeros((tile, width))
    product = x.new_empty((tile, out))
    for start in range(0, rows.shape[0], tile):
        count = min(tile, rows.shape[0] - start)
        buffer[:count].copy_(rows[start : start + count])
        torch.mm(buffer, weight.t(), out=product)
        result[start : start + count].copy_(product[:count])
    if bias is not None:
        result += bias
    return result.view(*x.shape[:-1], out)


def _tile_rows(weight: Tensor) -> int:
    """Rows of a tile. A small float32 weight stays in the processor's L2 cache, where short tiles cost little."""
    return 8 if weight.dtype == torch.float32 and weight.numel() <= 1 << 18 else 32
