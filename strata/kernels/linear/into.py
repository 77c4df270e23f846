"""Dense layers whose weight's gradient is written where it is wanted, wider than the weight, and not copied there.

Megatron-LM calls this gradient accumulation fusion. Of 8B parameters it saves a pass over 48 GB: a bfloat16 gradient
written and read and its float32 copy written, where the product can write that itself.
"""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.activation.silu_mul_grad import silu_mul_of_halves
from strata.kernels.custom_gradient import placeholder, with_gradients_of
from strata.kernels.gradient_target import GradientTarget
from strata.kernels.linear.fp8 import linear_fp8_into


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, target: GradientTarget) -> Tensor:
    """`linear` of x [tokens, width], weight [out, width], bias [out] or None -> [tokens, out].

    Its backward pass puts the weight's gradient into `target`; autograd gets none.
    """
    gradients = _LinearInto.apply(x, weight, bias, target)
    with torch.no_grad():
        product = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    return with_gradients_of(gradients, product)


def linear_silu_mul_into(x: Tensor, weight: Tensor, bias: Tensor | None, target: GradientTarget) -> Tensor:
    """`linear_silu_mul` (gate's rows of the weight, then up's) in the same way: -> [tokens, out / 2]."""
    return silu_mul_of_halves(linear_into(x, weight, bias, target))


def linear_silu_mul_fp8_into(
    x: Tensor, weight: Tensor, bias: Tensor | None, per_row: bool, target: GradientTarget
) -> Tensor:
    """And in 8 bits, see `linear_fp8_into`."""
    return silu_mul_of_halves(linear_fp8_into(x, weight, bias, per_row, target))


class _LinearInto(torch.autograd.Function):
    """Of the product that follows, all but the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: GradientTarget) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.target = target
        return placeholder(x, x.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_result = upstream[0]
        memory, adds = ctx.target.memory()
        put_product(memory, of_result.t(), x, adds=adds)
        ctx.target.written()
        of_x = torch.mm(of_result, weight) if ctx.needs_input_grad[0] else None
        return of_x, None, of_result.sum(0) if ctx.needs_input_grad[2] else None, None


def put_product(out: Tensor, a: Tensor, b: Tensor, *, adds: bool) -> None:
    """`out = a @ b`, or `out += a @ b`. out: of the dtype of a and b, or on CUDA float32 for narrower ones."""
    wider = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if adds:
        torch.addmm(out, a, b, out=out, **wider)  # type: ignore[call-overload]
    else:
        torch.mm(a, b, out=out, **wider)
