"""SwiGLU with gradients on CUDA: `silu_mul` of two tensors, and of the halves of one product, in 8 bits or not.

Importing this file registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.linear.fp8 import linear_fp8, linear_silu_mul_fp8
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.plain_tensor import all_plain
from strata.kernels.triton_import import HAS_TRITON, jit, tl


@jit
def silu_mul_backward_kernel(
    upstream, gate, up, of_gate, of_up, given_stride, gate_stride, up_stride, result_stride, width, BLOCK: tl.constexpr
):
    """Programs [rows, width / BLOCK]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    given = tl.load(upstream + row * given_stride + column, mask=held, other=0.0).to(tl.float32)
    opening = tl.load(gate + row * gate_stride + column, mask=held, other=0.0).to(tl.float32)
    value = tl.load(up + row * up_stride + column, mask=held, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-opening))
    slope = given * value * share * (1 + opening * (1 - share))
    offset = row * result_stride + column
    tl.store(of_gate + offset, slope.to(of_gate.dtype.element_ty), mask=held)
    tl.store(of_up + offset, (given * opening * share).to(of_up.dtype.element_ty), mask=held)


_COLUMNS = 1024


def silu_mul_gradients(upstream: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The gradients of gate and up [rows, width], side by side: [rows, 2 * width]."""
    rows, width = gate.shape
    upstream = upstream.contiguous()
    both = torch.empty((rows, 2 * width), dtype=gate.dtype, device=gate.device)
    of_gate, of_up = both.chunk(2, -1)
    if both.numel():
        tensors = (upstream, gate, up, of_gate, of_up)
        strides = [one.stride(0) for one in (upstream, gate, up, both)]
        grid = (rows, ceil_div(width, _COLUMNS))
        silu_mul_backward_kernel[grid](*tensors, *strides, width, BLOCK=_COLUMNS, num_warps=4)
    return both


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _silu_mul(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (half.reshape(-1, half.shape[-1]) for half in ctx.saved_tensors)
        shape = upstream[0].shape
        of_gate, of_up = silu_mul_gradients(upstream[0].reshape(-1, shape[-1]), gate, up).chunk(2, -1)
        return of_gate.reshape(shape), of_up.reshape(shape)


class _SiluMulOfHalves(torch.autograd.Function):
    """product [tokens, 2 * inner] (gate, then up) to [tokens, inner]; the gradient is one tensor like the product."""

    @staticmethod
    def forward(ctx: Any, product: Tensor) -> Tensor:
        ctx.save_for_backward(product)
        gate, up = product.chunk(2, -1)
        return _silu_mul(gate, up)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        return silu_mul_gradients(upstream[0], gate, up)


def silu_mul_of_halves(product: Tensor) -> Tensor:
    """`silu_mul` of the halves of the columns (gate, then up) of a product [tokens, 2 * inner]."""
    if HAS_TRITON and product.is_cuda and all_plain(product):
        return _SiluMulOfHalves.apply(product)  # type: ignore[no-any-return]
    gate, up = product.chunk(2, -1)
    result: Tensor = silu_mul(gate, up)
    return result


def _fits(gate: Tensor, up: Tensor) -> bool:
    return all_plain(gate, up) and gate.stride(-1) == 1 and up.stride(-1) == 1


def _product_fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return x.dim() == 2 and all_plain(x, weight)


def _gated(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: silu_mul_of_halves(product(*given))


_silu_mul = silu_mul.bind("cuda")
for _operation, _name, _run, _supports in (
    (silu_mul, "triton with gradients", _SiluMul.apply, _fits),
    (linear_silu_mul, "linear, silu_mul with gradients", _gated(F.linear), _product_fits),
    (linear_silu_mul_fp8, "linear_fp8, silu_mul with gradients", _gated(linear_fp8), lambda x, *_: all_plain(x)),
):
    _operation.in_triton(_run, _name, differentiable=True, supports=_supports)
