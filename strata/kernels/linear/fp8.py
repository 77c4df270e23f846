"""Dense layers whose three products (forward, gradient of the input, gradient of the weight) run in 8 bits.

Scales are those of the tensors at hand (dynamic). Per tensor, gradients are e5m2 and everything else e4m3, as nanochat
and torchao have it; per row everything is e4m3, torchao's row-wise recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.custom_gradient import placeholder, with_gradients_of
from strata.kernels.fused import Run, fused
from strata.kernels.gradient_target import GradientTarget
from strata.kernels.linear.linear import linear
from strata.kernels.op import operation
from strata.kernels.quant.fp8 import ALIGNMENT, multiply, pack_both_ways, put_product, scheme_of_scales
from strata.kernels.quant.quantized import QuantizedWeight

FORWARD = torch.float8_e4m3fn


def gradient_type(per_row: bool) -> torch.dtype:
    """Gradients spread wider than one scale a tensor serves with e4m3; a scale a row does serve them."""
    return torch.float8_e4m3fn if per_row else torch.float8_e5m2


def fits_fp8(weight: Tensor) -> bool:
    """Whether the products of a layer with this weight [out, width] can run in 8 bits."""
    return all(size % ALIGNMENT == 0 for size in weight.shape)


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None, per_row: bool, *, workload: Workload) -> Cost:
    product = linear.cost(x, weight, bias, workload=workload)
    # Both operands: their largest magnitudes and a multiplication.
    return Cost(product.flops + 3 * (x.numel() + weight.numel()), product.read, product.written, product.weights)


def _meta(x: Tensor, weight: Tensor, bias: Tensor | None, per_row: bool) -> Tensor:
    result: Tensor = linear.meta(x, weight, bias)
    return result


@operation(_cost, meta=_meta, product=True)
def linear_fp8(x: Tensor, weight: Tensor, bias: Tensor | None, per_row: bool) -> Tensor:
    """`x @ weight^T + bias` with the product's operands rounded to 8 bits; so are those of its gradients.

    x [tokens, width], weight [out, width], bias [out] or None -> [tokens, out], all of one dtype; width and out are
    multiples of 16. per_row: a scale for each row (and column) of the operands instead of one for each operand.
    """
    return linear_fp8_into(x, weight, bias, per_row, None)


def linear_fp8_into(
    x: Tensor, weight: Tensor, bias: Tensor | None, per_row: bool, target: GradientTarget | None
) -> Tensor:
    """`linear_fp8` whose backward pass puts the weight's gradient into `target`, if there is one."""
    gradients, *tensors = _LinearFp8.apply(x, weight, per_row, target)
    with torch.no_grad():
        product = multiply(*_operands(tensors, FORWARD, per_row), x.dtype, True)
    product = with_gradients_of(gradients, product)
    return product if bias is None else product + bias


def _operands(tensors: Sequence[Tensor], dtype: torch.dtype, per_row: bool) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Two operands from the values and scales of one and of the other, as autograd carries them."""
    values, scales, other_values, other_scales = tensors
    scheme = scheme_of_scales(dtype, per_row)
    return QuantizedWeight.of(scheme, values, scales), QuantizedWeight.of(scheme, other_values, other_scales)


class _LinearFp8(torch.autograd.Function):
    """Keeps both operands in 8 bits, transposed, as the backward pass sums over their other dimension."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, per_row: bool, target: GradientTarget | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A placeholder for the product; its operands, each as values and scales."""
        straight, turned = pack_both_ways(x, FORWARD, per_row)
        w_straight, w_turned = pack_both_ways(weight, FORWARD, per_row)
        ctx.save_for_backward(turned.values, turned.scales, w_turned.values, w_turned.scales)
        ctx.per_row, ctx.target = per_row, target
        operands = straight.values, straight.scales, w_straight.values, w_straight.scales
        ctx.mark_non_differentiable(*operands)
        ctx.set_materialize_grads(False)
        return placeholder(x, x.shape[0], weight.shape[0]), *operands

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        turned, w_turned = _operands(ctx.saved_tensors, FORWARD, ctx.per_row)
        dtype = upstream[0].dtype
        straight, g_turned = pack_both_ways(upstream[0], gradient_type(ctx.per_row), ctx.per_row)
        of_x = multiply(straight, w_turned, dtype, False)
        if ctx.target is None:
            return of_x, multiply(g_turned, turned, dtype, False), None, None
        memory, adds = ctx.target.memory()
        if adds:
            memory.add_(multiply(g_turned, turned, dtype, False))
        else:
            put_product(memory, g_turned, turned, dtype)
        ctx.target.written()
        return of_x, None, None, None


@fused(product=True, gated=True)
def linear_silu_mul_fp8(run: Run, x: Tensor, weight: Tensor, bias: Tensor | None, per_row: bool) -> Tensor:
    """`linear_silu_mul` (gate's rows of the weight, then up's) of a `linear_fp8` product: -> [tokens, out / 2]."""
    gate, up = run(linear_fp8, x, weight, bias, per_row).chunk(2, -1)
    result: Tensor = run(silu_mul, gate, up)
    return result
