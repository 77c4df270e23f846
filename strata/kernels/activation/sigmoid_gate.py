"""A result times the sigmoid of its gate: gated attention (Qiu et al. 2025), and experts that all tokens go to."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


def _cost(x: Tensor, gate: Tensor, *, workload: Workload) -> Cost:
    # A sigmoid is negation, exponential, sum and quotient; then the product.
    return Cost(flops=x.numel() + 4 * gate.numel(), read=x.nbytes + gate.nbytes, written=x.nbytes)


@operation(_cost, rowwise=True)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`, the sigmoid rounded first, as transformers' Qwen3NextAttention does.

    x: [..., width], gate: [..., width] or [..., 1], of one dtype -> like x.
    """
    return x * torch.sigmoid(gate)


def _blocks(x: Tensor, gate: Tensor) -> Tensor:
    return x * in_whole_vectors(gate, torch.sigmoid_)


@jit
def sigmoid_gate_kernel(
    x, gate, result, groups, width, x_row, x_group, gate_row, gate_group, SHARED: tl.constexpr, BLOCK: tl.constexpr
):
    """Programs [rows, groups, width / BLOCK]. SHARED: a group has one gate for all its columns."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    value = tl.load(x + row * x_row + group * x_group + column, mask=held, other=0.0)
    opening = gate + row * gate_row + group * gate_group
    opening = tl.load(opening) if SHARED else tl.load(opening + column, mask=held, other=0.0)
    opened = (1 / (1 + tl.exp(-opening.to(tl.float32)))).to(value.dtype).to(tl.float32)
    target = result + (row * groups + group) * width + column
    tl.store(target, (value.to(tl.float32) * opened).to(value.dtype), mask=held)


_MAX_COLUMNS = 1024


def _triton(x: Tensor, gate: Tensor) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not result.numel():
        return result
    rows, gates = (one if one.dim() == 3 else one[:, None] for one in (x, gate))
    block = min(next_power_of_2(x.shape[-1]), _MAX_COLUMNS)
    warps = max(1, block // 256)
    sizes = (rows.shape[1], x.shape[-1], *rows.stride()[:2], *gates.stride()[:2])
    known = {"SHARED": gate.shape[-1] < x.shape[-1], "BLOCK": block, "num_warps": warps}
    sigmoid_gate_kernel[(*rows.shape[:2], ceil_div(x.shape[-1], block))](rows, gates, result, *sizes, **known)
    return result


def _fits(x: Tensor, gate: Tensor) -> bool:
    """Rows, or groups of rows, of any distance, whose own columns stand side by side."""
    side_by_side = x.stride(-1) == 1 and (gate.shape[-1] == 1 or gate.stride(-1) == 1)
    return x.dim() in (2, 3) and side_by_side and x.dtype != torch.float64


sigmoid_gate.by_definition("cpu", differentiable=True)
sigmoid_gate.implement("blocks", "cpu", invariant=True)(_blocks)
sigmoid_gate.in_triton(_triton, invariant=True, supports=_fits, kernels=(sigmoid_gate_kernel,))
sigmoid_gate.by_definition("cuda", invariant=True, differentiable=True)
