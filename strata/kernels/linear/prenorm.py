"""Linear layers around an RMS norm (Zhang and Sennrich 2019) whose scale moves from the product's input to its output.

A norm multiplies each row by one number, and so does not care on which side of the next product it does so. What needs
no look at a whole row (the residual addition, the norm's weights, sums of squares over blocks of columns) happens where
the row is made, `linear_add`; the scale is applied where the row is read, to the product: `scaled_linear`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.fused import Run, fused
from strata.kernels.linear.linear import linear
from strata.kernels.linear.small_m import SmallMProduct, implement_small_m
from strata.kernels.op import ATEN, operation
from strata.kernels.quant.quantized import QuantizedWeight

Weight = TypeVar("Weight", Tensor, QuantizedWeight)

# A program reads the squares of whole rows at once.
_MAX_BLOCKS = 2048


class AddCall(NamedTuple, Generic[Weight]):
    """The operands of `linear_add`: x [..., width], weight [out, width], bias [out] or None, residual [..., out],
    norm_weight [out]; one dtype."""

    x: Tensor
    weight: Weight
    bias: Tensor | None
    residual: Tensor
    norm_weight: Tensor


class ScaledCall(NamedTuple, Generic[Weight]):
    """The operands of `scaled_linear`: weighted [..., width] and squares [..., blocks] float32 as `linear_add` makes
    them, eps of the norm, weight [out, width], bias [out] or None. Of `scaled_linear_silu_mul`, too, where weight is
    [2 * inner, width] (and bias), the rows of the gate and then those of `up`."""

    weighted: Tensor
    squares: Tensor
    eps: float
    weight: Weight
    bias: Tensor | None


def _add_cost(call: AddCall[Any], *, workload: Workload) -> Cost:
    x, weight, bias, residual, norm_weight = call
    elements = residual.numel()
    product = linear.cost(x, weight, bias, workload=workload)
    # The addition, the norm's weight, and a square that is added up. The product itself is not written, its sum is.
    return product + Cost(
        flops=4 * elements,
        read=residual.nbytes + norm_weight.nbytes,
        written=residual.nbytes + 4 * (elements // weight.shape[0]),
        weights=norm_weight.nbytes,
    )


def _add_meta(call: AddCall[Any]) -> tuple[Tensor, Tensor, Tensor]:
    x, residual = call.x, call.residual
    total, weighted = (residual.new_empty(residual.shape, device="meta") for _ in range(2))
    return total, weighted, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32, device="meta")


@operation(_add_cost, operands=AddCall, meta=_add_meta, rowwise=True, packable=(1,), dense=True)
def linear_add(call: AddCall[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """`x @ weight^T + bias + residual`, and what the norm of that sum is made from.

    Returns total [..., out]; weighted [..., out], total * norm_weight; squares [..., blocks] float32, the sums of
    squares of `total` over blocks of its columns. How many blocks depends on the implementation.
    """
    x, weight, bias, residual, norm_weight = call
    total = linear.reference(x, weight, bias) + residual
    wide = torch.promote_types(total.dtype, torch.float32)
    return total, total * norm_weight, total.to(wide).square().sum(-1, keepdim=True)


def _scaled_cost(call: ScaledCall[Any], *, workload: Workload) -> Cost:
    weighted, squares, _, weight, bias = call
    product = linear.cost(weighted, weight, bias, workload=workload)
    return product + Cost(flops=weighted.numel() // weight.shape[1] * weight.shape[0], read=squares.nbytes)


def _scaled_meta(call: ScaledCall[Any]) -> Tensor:
    return call.weighted.new_empty((*call.weighted.shape[:-1], call.weight.shape[0]), device="meta")


@operation(_scaled_cost, operands=ScaledCall, meta=_scaled_meta, rowwise=True, packable=(3,), dense=True)
def scaled_linear(call: ScaledCall[Any]) -> Tensor:
    """`(weighted @ weight^T) / sqrt(sum(squares) / width + eps) + bias`, [..., out]: the linear layer after a norm."""
    weighted, squares, eps, weight, bias = call
    scale = torch.rsqrt(squares.sum(-1, keepdim=True) / weight.shape[1] + eps)
    # Scaled before the product, which rounds to the dtype: not once more after it.
    product: Tensor = linear.reference((weighted * scale).to(weighted.dtype), weight, bias)
    return product


@fused(operands=ScaledCall, rowwise=True, packable=(3,), dense=True)
def scaled_linear_silu_mul(run: Run, call: ScaledCall[Any]) -> Tensor:
    """`silu_mul` of the two halves of `scaled_linear`, [..., inner]."""
    gate, up = run(scaled_linear, *call).chunk(2, -1)
    result: Tensor = run(silu_mul, gate, up)
    return result


def _add_product(call: AddCall[Any]) -> SmallMProduct:
    x, weight, bias, residual, norm_weight = call
    x, residual = (one.reshape(-1, one.shape[-1]) for one in (x, residual))
    return SmallMProduct(x, weight, bias, residual=residual, norm_weight=norm_weight)


def _can_add(call: AddCall[Any]) -> bool:
    residual = call.residual
    return residual.dtype == call.norm_weight.dtype == call.x.dtype and residual.stride(-1) == 1


def _scaled_product(gated: bool, call: ScaledCall[Any]) -> SmallMProduct:
    weighted, squares, eps, weight, bias = call
    x, squares = weighted.reshape(-1, weighted.shape[-1]), squares.view(-1, squares.shape[-1])
    return SmallMProduct(x, weight, bias, squares, eps, gated)


def _can_scale(call: ScaledCall[Any]) -> bool:
    return call.squares.shape[-1] <= _MAX_BLOCKS and call.squares.is_contiguous()


def _factors(call: AddCall[Any] | ScaledCall[Any]) -> tuple[Tensor, Any]:
    return (call.x if isinstance(call, AddCall) else call.weighted), call.weight


_packed_linear, _silu_mul = linear.bind("cuda", packed=True), silu_mul.bind("cuda")


def _add_in_parts(call: AddCall[QuantizedWeight]) -> tuple[Tensor, Tensor, Tensor]:
    total = _packed_linear(*call[:3]) + call.residual
    return total, total * call.norm_weight, total.float().square().sum(-1, keepdim=True)


def _scale_in_parts(gated: bool, call: ScaledCall[QuantizedWeight]) -> Tensor:
    weighted, squares, eps, weight, bias = call
    scale = torch.rsqrt(squares.sum(-1, keepdim=True) / weight.shape[1] + eps)
    product: Tensor = _packed_linear((weighted * scale).to(weighted.dtype), weight, bias)
    return _silu_mul(*product.chunk(2, -1)) if gated else product


def _kernels_of_parts(gated: bool, call: AddCall[QuantizedWeight] | ScaledCall[QuantizedWeight]) -> tuple[str, ...]:
    product = _packed_linear.launches(*_factors(call), call.bias)
    if isinstance(call, AddCall):
        return (*product, ATEN)
    half = scaled_linear_silu_mul.meta(*call)
    return (ATEN, *product, *(_silu_mul.launches(half, half) if gated else ()))


for _made, _product, _can_read, _in_parts in (
    (linear_add, _add_product, _can_add, _add_in_parts),
    (scaled_linear, partial(_scaled_product, False), _can_scale, partial(_scale_in_parts, False)),
    (scaled_linear_silu_mul, partial(_scaled_product, True), _can_scale, partial(_scale_in_parts, True)),
):
    implement_small_m(_made, _product, _factors, _can_read)
    _parts = partial(_kernels_of_parts, _made is scaled_linear_silu_mul)
    _made.implement("linear, torch", "cuda", kernels=_parts, packed=True)(_in_parts)
