"""A product of few rows, its sum over ranks and the norm of that on CUDA, in two launches: one sends, one receives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strata.comm.all_reduce_cuda import beside_the_kernel_ahead, fits_one_shot_norm, needed_memory
from strata.comm.mesh import Axis
from strata.kernels.choose import thresholds
from strata.kernels.collective.all_reduce import row_tile
from strata.kernels.collective.sent_products import one_shot_received_norm_kernel
from strata.kernels.linear.linear import linear
from strata.kernels.linear.skinny import Inboxes, SkinnyProduct, kernels_of, multiply
from strata.kernels.linear.skinny_tiles import SkinnyTile
from strata.kernels.linear.tile_rule import chosen_tile

_WORD = 4


def fits_sent_product(x: Tensor, axis: Any, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> bool:
    """Each program has whole sums to send, and a program of the receiver takes a row at once."""
    if x.dim() != 2 or x.shape[0] > thresholds(x.device).sent_rows or residual.dtype != x.dtype:
        return False
    tile = _tile(x, weight)
    return (
        tile is not None
        and tile.splits == 1
        and fits_one_shot_norm(linear.meta(x, weight), axis, residual, norm_weight, eps)
    )


def sent_product_norm(
    x: Tensor, axis: Axis, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    memory, tile = needed_memory(axis), _tile(x, weight)
    assert tile is not None
    rows, width = residual.shape
    words = width * x.itemsize // _WORD
    # Neither may lie where the product still reads x while the first rows are received.
    total, result = x.new_empty(residual.shape), x.new_empty(residual.shape)
    beside = beside_the_kernel_ahead(x, memory, *row_tile(words))
    inboxes = Inboxes(memory.peers, memory.counters, axis.index, starts_receiver=beside["EARLY"])
    multiply(SkinnyProduct(x, weight, inboxes=inboxes), tile)
    one_shot_received_norm_kernel[(rows,)](
        residual,
        norm_weight,
        total,
        result,
        memory.inbox,
        memory.counters,
        residual.stride(0) * residual.itemsize // _WORD,
        words,
        width,
        eps,
        **beside,
    )
    return total, result


def sent_product_kernels(x: Tensor, axis: Any, weight: Tensor, *_: Any) -> tuple[Any, ...]:
    tile = _tile(x, weight)
    assert tile is not None
    return (*kernels_of(tile, weight), one_shot_received_norm_kernel)


def _tile(x: Tensor, weight: Tensor) -> SkinnyTile | None:
    """That of the product alone, so that its bits are the same."""
    return chosen_tile(linear.name, x, weight)
