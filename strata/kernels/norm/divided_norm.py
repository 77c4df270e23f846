"""An RMS norm of rows that several ranks divide: each squares its own columns, the sum over the ranks scales them."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation

# A row of 16 bytes is a word of the kernels that carry messages.
_COPIES = 4


def _square_cost(x: Tensor, *, workload: Workload) -> Cost:
    return Cost(flops=2 * x.numel(), read=x.nbytes, written=x.numel() // x.shape[-1] * _COPIES * 4)


def _square_meta(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((*x.shape[:-1], _COPIES), dtype=wide, device="meta")


@operation(_square_cost, meta=_square_meta, rowwise=True)
def mean_square(x: Tensor) -> Tensor:
    """The mean of the squares of each row, four times: x [..., width] -> [..., 4] float32 (float64 for float64)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.square().mean(-1, keepdim=True).expand(*x.shape[:-1], _COPIES)


def _norm_cost(
    x: Tensor, total: Tensor, ranks: int, weight: Tensor, eps: float, offset: float, *, workload: Workload
) -> Cost:
    read = x.nbytes + total.nbytes + weight.nbytes
    return Cost(flops=2 * x.numel(), read=read, written=x.nbytes, weights=weight.nbytes)


@operation(_norm_cost, rowwise=True)
def divided_rms_norm(x: Tensor, total: Tensor, ranks: int, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`wide_rms_norm` of this rank's columns of rows that `ranks` ranks divide evenly.

    x [..., own width]; total [..., 4] float32, the sum over the ranks of `mean_square` of their columns; weight
    [own width], of these columns -> like x. Columns that several ranks hold count once for each, which leaves the mean
    as it is where all are held equally often.
    """
    scale = torch.rsqrt(total[..., :1] / ranks + eps)
    return (x.to(total.dtype) * scale * (weight.to(total.dtype) + offset)).to(x.dtype)


mean_square.by_definition("cpu", invariant=True, differentiable=True)
# On a GPU the order in which torch adds up a row depends on how many there are.
mean_square.by_definition("cuda", differentiable=True)
divided_rms_norm.by_definition("cpu", "cuda", invariant=True, differentiable=True)
