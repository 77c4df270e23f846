"""The dense layer as a sum over slices of its width in an order that does not depend on how many ranks hold them.

Ranks that divide the width of a product add their parts up. Which bits come out depends on the order of the sum, and a
product that one rank computes whole has another order than two halves. Here the width is cut into equal slices that are
added pairwise (`strata.kernels.pairwise`). Ranks with 4, 2 or 1 of eight slices have whole branches of that tree, so
that their sums, added pairwise too, have its bits. They are float32 until the last sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear.fixed import Tile, buffered_linear, fits, launch_linear, linear_kernel
from strata.kernels.linear.linear import linear
from strata.kernels.op import operation
from strata.kernels.pairwise import pairwise_sum

MOST_SLICES = 8


def _cost(x: Tensor, weight: Tensor, slices: int, wide: bool, *, workload: Workload) -> Cost:
    product = linear.cost(x, weight, None, workload=workload)
    elements = x.numel() // weight.shape[1] * weight.shape[0]
    widened = elements * (4 - x.itemsize) if wide and x.itemsize < 4 else 0
    return product + Cost(flops=elements * (slices - 1), written=widened)


def _meta(x: Tensor, weight: Tensor, slices: int, wide: bool) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype, device="meta")


@operation(_cost, meta=_meta, rowwise=True, dense=True)
def sliced_linear(x: Tensor, weight: Tensor, slices: int, wide: bool) -> Tensor:
    """`x @ weight^T` as the sum over `slices` equal slices of the width, added pairwise in float32.

    x [..., width], weight [out, width], one dtype; slices: 1, 2, 4 or 8, which divide the width. wide: whether the
    result stays float32 (float64 for float64), for a sum with other ranks' results, or is rounded to x's dtype.
    -> [..., out].
    """
    total = pairwise_sum([_wide_product(*operands) for operands in _slices(x, weight, slices)])
    return total if wide else total.to(x.dtype)


def _slices(x: Tensor, weight: Tensor, slices: int) -> list[tuple[Tensor, Tensor]]:
    if slices not in (1, 2, 4, MOST_SLICES) or weight.shape[1] % slices:
        raise ValueError(
            f"{slices} slices of a width of {weight.shape[1]}; accepted are 1, 2, 4 and {MOST_SLICES} that divide it"
        )
    return list(zip(x.chunk(slices, -1), weight.chunk(slices, 1), strict=True))


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return linear.reference(x.to(dtype), weight.to(dtype), None)  # type: ignore[no-any-return]


@sliced_linear.implement("fixed tiles", "cpu", invariant=True)
def _buffered(x: Tensor, weight: Tensor, slices: int, wide: bool) -> Tensor:
    """Of copies: a library may choose its order of the sum by the stride of the weight, too."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    parts = []
    for some, columns in _slices(x, weight, slices):
        own = torch.empty(columns.shape, dtype=dtype).copy_(columns)
        parts.append(buffered_linear(some.to(dtype), own))
    total = pairwise_sum(parts)
    return total if wide else total.to(x.dtype)


# Of 64 rows or more, like those of `linear_kernel`: all run the same instruction over the same steps of the width.
# Up to three sums wait beside the one that grows, so tiles are smaller.
_SINGLE = Tile(64, 64, 8, 3, 32)
_FEW, _MANY = Tile(64, 32, 4, 8), Tile(128, 32, 8, 4)


def _tile(rows: int, dtype: torch.dtype) -> Tile:
    """It does not change the bits."""
    if dtype == torch.float32:
        return _SINGLE
    return _FEW if rows <= 64 else _MANY


def _triton(x: Tensor, weight: Tensor, slices: int, wide: bool) -> Tensor:
    tile = _tile(x.numel() // weight.shape[1], x.dtype)
    return launch_linear(x, weight, None, torch.float32 if wide else x.dtype, slices, tile)


def _fits(x: Tensor, weight: Tensor, slices: int, wide: bool) -> bool:
    return fits(x, weight) and slices in (1, 2, 4, MOST_SLICES) and weight.shape[1] % slices == 0


sliced_linear.in_triton(_triton, invariant=True, supports=_fits, kernels=(linear_kernel,))
