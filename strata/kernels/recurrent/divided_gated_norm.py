"""A gated RMS norm of rows that several ranks divide: each squares its own columns, the sum over ranks scales them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.norm.divided_norm import mean_square
from strata.kernels.op import operation

# A row of 16 bytes is a word of the kernels that carry messages.
_COPIES = 4


def _square_cost(x: Tensor, gate: Tensor, *, workload: Workload) -> Cost:
    # silu is negation, exponential, sum and quotient.
    return Cost(7 * x.numel(), x.nbytes + gate.nbytes, x.numel() // x.shape[-1] * _COPIES * 4)


def _square_meta(x: Tensor, gate: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((*x.shape[:-1], _COPIES), dtype=wide, device="meta")


@operation(_square_cost, meta=_square_meta, rowwise=True)
def gated_mean_square(x: Tensor, gate: Tensor) -> Tensor:
    """The mean of the squares of each row of `x * silu(gate)`, four times.

    x, gate [..., width] of one dtype -> [..., 4] float32 (float64 for float64).
    """
    found: Tensor = mean_square.reference(_gated(x, gate))
    return found


def _norm_cost(
    x: Tensor, gate: Tensor, total: Tensor, ranks: int, weight: Tensor, eps: float, *, workload: Workload
) -> Cost:
    read = x.nbytes + gate.nbytes + total.nbytes + weight.nbytes
    # silu, what it lets through, scale and weight.
    return Cost(flops=7 * x.numel(), read=read, written=x.nbytes, weights=weight.nbytes)


@operation(_norm_cost, rowwise=True)
def divided_gated_rms_norm(x: Tensor, gate: Tensor, total: Tensor, ranks: int, weight: Tensor, eps: float) -> Tensor:
    """`gated_rms_norm`, gated first, of this rank's columns of rows that are one group and that `ranks` ranks divide
    evenly.

    x, gate [..., own width]; total [..., 4] float32, the sum over the ranks of `gated_mean_square` of their columns;
    weight [own width], of these columns -> like x. Rounded to x's dtype before the weight.
    """
    scale = torch.rsqrt(total[..., :1] / ranks + eps)
    return weight * (_gated(x, gate) * scale).to(x.dtype)


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    wide, opening = (one.to(torch.promote_types(x.dtype, torch.float32)) for one in (x, gate))
    # On a CPU what is left over of a vector is computed in another way, and which elements are depends on the rows.
    opened = in_whole_vectors(opening, partial(F.silu, inplace=True)) if x.device.type == "cpu" else F.silu(opening)
    return wide * opened


gated_mean_square.by_definition("cpu", name="blocks", invariant=True)
# On a GPU the order in which torch adds up a row depends on how many there are.
gated_mean_square.by_definition("cuda")
divided_gated_rms_norm.by_definition("cpu", name="blocks", invariant=True)
divided_gated_rms_norm.by_definition("cuda", invariant=True)
