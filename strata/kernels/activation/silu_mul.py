"""Gated activations: of SwiGLU layers (Shazeer 2020) `silu(gate) * up`; of GEGLU layers (Shazeer 2020) `gelu(gate) *
up`, gelu by its tanh approximation; of gpt-oss (OpenAI 2025) a SwiGLU (Shazeer 2020) of bounded inputs, times up + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import Operation, elementwise, operation
from strata.kernels.triton_import import jit, tl


# silu(g) = g / (1 + exp(-g)) is a negation, an exponential, an addition and a division; then the product.
@operation(elementwise(5), rowwise=True, fusible=True)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`: gate and up [..., width] of one dtype -> [..., width].

    silu is computed in float32 and rounded to the dtype before the product, as transformers does.
    """
    return F.silu(gate) * up


@silu_mul.implement("torch", "cpu")
def _torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


@silu_mul.implement("blocks", "cpu", invariant=True)
def _blocks(gate: Tensor, up: Tensor) -> Tensor:
    return in_whole_vectors(gate, partial(F.silu, inplace=True)).mul_(up)


_COLUMNS = 1024


@jit
def silu_in_float32(opening):
    """silu in float32, rounded to the dtype of what it is of."""
    wide = opening.to(tl.float32)
    return (wide / (1 + tl.exp(-wide))).to(opening.dtype).to(tl.float32)


@jit
def silu_mul_kernel(gate, up, result, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    opening = tl.load(gate + row * gate_stride + column, mask=held, other=0.0)
    silu = silu_in_float32(opening)
    value = tl.load(up + row * up_stride + column, mask=held, other=0.0).to(tl.float32)
    tl.store(result + row * width + column, (silu * value).to(opening.dtype), mask=held)


def by_rows(kernel: Any, gate: Tensor, up: Tensor) -> Tensor:
    """What a kernel of a gated activation makes of gate and up, a program for some columns of a row."""
    result = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    width = gate.shape[-1]
    rows, others = gate.reshape(-1, width), up.reshape(-1, width)
    if result.numel():
        sizes = (rows.stride(0), others.stride(0), width)
        kernel[(len(rows), ceil_div(width, _COLUMNS))](rows, others, result, *sizes, BLOCK=_COLUMNS, num_warps=4)
    return result


def implement_by_rows(operation: Operation, kernel: Any) -> None:
    """Register the kernel of a gated activation."""

    def supports(gate: Tensor, up: Tensor) -> bool:
        return gate.dtype != torch.float64

    operation.in_triton(partial(by_rows, kernel), invariant=True, supports=supports, kernels=(kernel,))


implement_by_rows(silu_mul, silu_mul_kernel)


# x * sigmoid(2 y) with y = a * (x + b * x^3): three products and a sum, and what a silu takes; then the product.
@operation(elementwise(9), rowwise=True)
def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) * up`: gate and up [..., width] of one dtype -> [..., width].

    gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016) is computed in float32
    and rounded to the dtype before the product, as transformers does.
    """
    return F.gelu(gate, approximate="tanh") * up


gelu_mul.by_definition("cpu", differentiable=True)


@gelu_mul.implement("blocks", "cpu", invariant=True)
def _gelu_mul_blocks(gate: Tensor, up: Tensor) -> Tensor:
    return in_whole_vectors(gate, lambda block: block.copy_(F.gelu(block, approximate="tanh"))).mul_(up)


@jit
def gelu_mul_kernel(gate, up, result, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    opening = tl.load(gate + row * gate_stride + column, mask=held, other=0.0)
    wide = opening.to(tl.float32)
    # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
    inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    gelu = (wide / (1 + tl.exp(-inner))).to(opening.dtype).to(tl.float32)
    value = tl.load(up + row * up_stride + column, mask=held, other=0.0).to(tl.float32)
    tl.store(result + row * width + column, (gelu * value).to(opening.dtype), mask=held)


implement_by_rows(gelu_mul, gelu_mul_kernel)


class Clamp(NamedTuple):
    """alpha: what the gate is multiplied by inside the sigmoid. limit: the most of a gate, and of |up|."""

    alpha: float
    limit: float


# Three bounds, a product and four operations of a sigmoid, its product with the gate, the sum and the last product.
@operation(elementwise(11), rowwise=True)
def clamped_swiglu(gate: Tensor, up: Tensor, clamp: Clamp) -> Tensor:
    """`g * sigmoid(alpha * g) * (u + 1)` with g = min(gate, limit) and u = up within -limit and limit.

    gate, up: [..., width] of one dtype -> [..., width], computed in float32 (float64 for float64) and rounded once.
    """
    return _gated(gate, up, clamp, torch.sigmoid)


def _gated(gate: Tensor, up: Tensor, clamp: Clamp, sigmoid: Callable[[Tensor], Tensor]) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    bounded = gate.to(wide).clamp(max=clamp.limit)
    factor = up.to(wide).clamp(-clamp.limit, clamp.limit) + 1
    return (bounded * sigmoid(clamp.alpha * bounded) * factor).to(gate.dtype)


def _clamped_swiglu_blocks(gate: Tensor, up: Tensor, clamp: Clamp) -> Tensor:
    return _gated(gate, up, clamp, lambda x: in_whole_vectors(x, torch.sigmoid_))


clamped_swiglu.by_definition("cpu", differentiable=True)
clamped_swiglu.implement("blocks", "cpu", invariant=True)(_clamped_swiglu_blocks)
clamped_swiglu.by_definition("cuda", invariant=True, differentiable=True)
