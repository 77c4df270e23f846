"""Rotary position embedding (Su et al. 2021), with the halves of a head as the two coordinates of each rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation


def _cost(x: Tensor, positions: Tensor, table: Tensor, *, workload: Workload) -> Cost:
    # A rotation of a pair is four products and two sums.
    angles = positions.numel() * table.shape[1] * table.element_size()
    return Cost(flops=3 * x.numel(), read=x.nbytes + positions.nbytes + angles, written=x.nbytes)


def _meta(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    return x.new_empty(x.shape, device="meta")


@operation(_cost, meta=_meta)
def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotate each head by the angles of its token's position.

    x [tokens, heads, head_dim], positions [tokens] int32, table [max_length, head_dim] float32 -> like x. The first
    half of a table row are the cosines, the second the sines. Element i and element i + head_dim / 2 of a head are
    the coordinates of rotation i. Computed in float32 (float64 for float64 input).
    """
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


@rope.implement("torch", "cpu", invariant=True)
def _torch(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    # The reference with fewer temporaries. Each product and sum is rounded once, so no bit depends on the shape.
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    head = (first * cos).sub_(second * sin)
    tail = (second * cos).add_(first * sin)
    return torch.cat((head, tail), -1).to(x.dtype)
