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
from strata.kernels.destination import Destination
from strata.kernels.linear.fp8 import linear_fp8_into
from strata.kernels.stand_in import stand_in, with_gradients_of


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, destination: Destination) -> Tensor:
    """`linear` of x [tokens, width], weight [out, width], bias [out] or None -> [tokens, out].

    Its backward pass puts the weight's gradient into `destination`; autograd gets none.
    """
    gradients = _LinearInto.apply(x, weight, bias, destination)
    with torch.no_grad():
        product = torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    return with_gradients_of(gradients, product)


def linear_silu_mul_into(x: Tensor, weight: Tensor, bias: Tensor | None, destination: Destination) -> Tensor:
    """`linear_silu_mul` (gate's rows of the weight, then up's) in the same way: -> [tokens, out / 2]."""
    return silu_mul_of_halves(linear_into(x, weight, bias, destination))


def linear_silu_mul_fp8_into(
    x: Tensor, weight: Tensor, bias: Tensor | None, per_row: bool, destination: Destination
) -> Tensor:
    """And in 8 bits, see `linear_fp8_into`."""
    return silu_mul_of_halves(linear_fp8_into(x, weight, bias, per_row, destination))


class _LinearInto(torch.autograd.Function):
    """Of the product that follows, all but the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, destination: Destination) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.destination = destination
        return stand_in(x, x.shape[0], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_result = upstream[0]
        place, adds = ctx.destination.place()
        put_product(place, of_result.t(), x, adds=adds)
        ctx.destination.filled()
        of_x = torch.mm(of_result, weight) if ctx.needs_input_grad[0] else None
        return of_x, None, of_result.sum(0) if ctx.needs_input_grad[2] else None, None


def put_product(place: Tensor, a: Tensor, b: Tensor, *, adds: bool) -> None:
    """`place = a @ b`, or `place += a @ b`. place: of the dtype of a and b, or on CUDA float32 for narrower ones."""
    wider = {} if place.dtype == a.dtype else {"out_dtype": place.dtype}
    if adds:
        torch.addmm(place, a, b, out=place, **wider)  # type: ignore[call-overload]
    else:
        torch.mm(a, b, out=place, **wider)
