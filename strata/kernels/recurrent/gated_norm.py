"""RMS norm of a recurrence's result and its gate: Mamba-2 gates first, gated delta networks gate afterwards.

`sharded_gated_rms_norm`: of rows that several ranks divide: each squares its own columns, the sum over ranks scales
them.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.norm.norm import mean_square
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


def _cost(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool, *, workload: Workload
) -> Cost:
    # Square, add, scale and weight; silu is negation, exponential, sum and quotient, and it multiplies.
    return Cost(9 * x.numel(), x.nbytes + gate.nbytes + weight.nbytes, x.nbytes, weight.nbytes)


@operation(_cost, rowwise=True)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool) -> Tensor:
    """`weight * norm(x * silu(gate))` (gate_first) or `weight * norm(x) * silu(gate)`, over groups of `size` columns.

    x, gate [..., width], weight [width] of one dtype, size dividing width -> [..., width]; norm is `v / sqrt(mean(v^2)
    + eps)` of each group. Float32 (float64 for float64 input), rounded to x's dtype before the weight, as transformers'
    MambaRMSNormGated and Qwen3NextRMSNormGated do.
    """
    wide, opening = (one.to(torch.promote_types(x.dtype, torch.float32)) for one in (x, gate))
    return _normed(wide, F.silu(opening), x.dtype, weight, eps, size, gate_first)


def _normed(
    wide: Tensor, opening: Tensor, dtype: torch.dtype, weight: Tensor, eps: float, size: int, gate_first: bool
) -> Tensor:
    value = (wide * opening if gate_first else wide).unflatten(-1, (-1, size))
    normed = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    weighted: Tensor = weight * normed.to(dtype)
    return weighted if gate_first else (weighted * opening).to(dtype)


gated_rms_norm.by_definition("cpu", differentiable=True)


@gated_rms_norm.implement("blocks", "cpu", invariant=True)
def _blocks(x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool) -> Tensor:
    """A group is reduced in an order that depends on its size only."""
    wide, opening = (one.to(torch.promote_types(x.dtype, torch.float32)) for one in (x, gate))
    opened = in_whole_vectors(opening, partial(F.silu, inplace=True))
    return _normed(wide, opened, x.dtype, weight, eps, size, gate_first)


@jit
def gated_rms_norm_kernel(
    x,
    gate,
    weight,
    result,
    groups,
    size,
    x_row,
    x_group,
    gate_row,
    gate_group,
    weight_group,
    eps,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [rows, groups]: one group of one row. Strides are of rows and of groups."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    held = column < size
    values = tl.load(x + row * x_row + group * x_group + column, mask=held, other=0.0)
    opening = tl.load(gate + row * gate_row + group * gate_group + column, mask=held, other=0.0).to(tl.float32)
    opening = opening / (1 + tl.exp(-opening))
    wide = values.to(tl.float32)
    if GATE_FIRST:
        wide = wide * opening
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)).to(values.dtype).to(tl.float32)
    factor = tl.load(weight + group * weight_group + column, mask=held, other=0.0).to(tl.float32)
    weighted = (normed * factor).to(values.dtype)
    if not GATE_FIRST:
        weighted = (weighted.to(tl.float32) * opening).to(values.dtype)
    tl.store(result + (row * groups + group) * size + column, weighted, mask=held)


def _warps(size: int) -> int:
    return min(max(next_power_of_2(size) // 512, 1), 16)


def _triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return result
    # Rows and groups with a stride each: parts of a wider product, or heads of tokens.
    rows, gates = (one if one.dim() == 3 else one.flatten(0, -2).unflatten(-1, (-1, size)) for one in (x, gate))
    gated_rms_norm_kernel[tuple(rows.shape[:2])](
        *(rows, gates, weight, result, rows.shape[1], size, *rows.stride()[:2], *gates.stride()[:2]),
        0 if x.dim() == 3 else size,
        eps,
        GATE_FIRST=gate_first,
        BLOCK=next_power_of_2(size),
        num_warps=_warps(size),
    )
    return result


def _fits(x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, gate_first: bool) -> bool:
    plain = x.dim() == 2 or (x.dim() == 3 and size == x.shape[-1])
    side_by_side = x.stride(-1) == 1 and gate.stride(-1) == 1
    return plain and side_by_side and size <= 16384 and x.dtype != torch.float64


gated_rms_norm.in_triton(_triton, invariant=True, supports=_fits, kernels=(gated_rms_norm_kernel,))
gated_rms_norm.by_definition("cuda", differentiable=True)


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
def sharded_gated_rms_norm(x: Tensor, gate: Tensor, total: Tensor, ranks: int, weight: Tensor, eps: float) -> Tensor:
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
sharded_gated_rms_norm.by_definition("cpu", name="blocks", invariant=True)
sharded_gated_rms_norm.by_definition("cuda", invariant=True)
