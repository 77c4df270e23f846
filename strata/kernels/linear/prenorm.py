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
from strata.kernels.linear.packed import few_rows
from strata.kernels.linear.skinny import SkinnyProduct, kernels_of, multiply, scratch_bytes
from strata.kernels.linear.skinny_tiles import IMPLEMENTATION
from strata.kernels.linear.tile_choice import chosen_tile
from strata.kernels.op import ATEN, operation
from strata.kernels.quant.packed import PackedWeight
from strata.kernels.triton_import import HAS_TRITON

Weight = TypeVar("Weight", Tensor, PackedWeight)

# A program reads the squares of whole rows at once.
_MOST_BLOCKS = 2048


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


def _adds(call: AddCall[Tensor]) -> bool:
    return chosen_tile(linear_add.name, call.x, call.weight) is not None and _is_alike(call)


def _is_alike(call: AddCall[Any]) -> bool:
    """Whether what is added can be read beside the product."""
    residual = call.residual
    return residual.dtype == call.norm_weight.dtype == call.x.dtype and residual.stride(-1) == 1


def _adds_skinny(call: AddCall[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias, residual, norm_weight = call
    tile = chosen_tile(linear_add.name, x, weight)
    assert tile is not None
    residual_rows = residual.reshape(-1, residual.shape[-1])
    product = SkinnyProduct(x.reshape(-1, x.shape[-1]), weight, bias, residual=residual_rows, norm_weight=norm_weight)
    total, weighted, squares = multiply(product, tile)
    return total.view(residual.shape), weighted.view(residual.shape), squares.view(*x.shape[:-1], -1)


def _holds_squares(call: ScaledCall[Any]) -> bool:
    return call.squares.shape[-1] <= _MOST_BLOCKS and call.squares.is_contiguous()


def _scales(operation: str, call: ScaledCall[Tensor]) -> bool:
    return _holds_squares(call) and chosen_tile(operation, call.weighted, call.weight) is not None


def _scales_skinny(operation: str, call: ScaledCall[Tensor]) -> Tensor:
    weighted, squares, eps, weight, bias = call
    tile = chosen_tile(operation, weighted, weight)
    assert tile is not None
    rows, row_squares = weighted.reshape(-1, weighted.shape[-1]), squares.view(-1, squares.shape[-1])
    gated = operation == scaled_linear_silu_mul.name
    (result,) = multiply(SkinnyProduct(rows, weight, bias, row_squares, eps, gated), tile)
    return result.view(*weighted.shape[:-1], result.shape[-1])


def _factors(call: AddCall[Weight] | ScaledCall[Weight]) -> tuple[Tensor, Weight]:
    return (call.x if isinstance(call, AddCall) else call.weighted), call.weight


def _kernels(operation: str, call: AddCall[Tensor] | ScaledCall[Tensor]) -> tuple[Any, ...]:
    return kernels_of(chosen_tile(operation, *_factors(call)))


def _scratch(operation: str, call: AddCall[Tensor] | ScaledCall[Tensor]) -> int:
    x, weight = _factors(call)
    return scratch_bytes(chosen_tile(operation, x, weight), x.numel() // weight.shape[1], weight.shape[0])


if HAS_TRITON:
    for _made, _run, _fits in (
        (linear_add, _adds_skinny, _adds),
        (scaled_linear, partial(_scales_skinny, scaled_linear.name), partial(_scales, scaled_linear.name)),
        (
            scaled_linear_silu_mul,
            partial(_scales_skinny, scaled_linear_silu_mul.name),
            partial(_scales, scaled_linear_silu_mul.name),
        ),
    ):
        _told: dict[str, Any] = {"kernels": partial(_kernels, _made.name), "scratch": partial(_scratch, _made.name)}
        _made.implement(IMPLEMENTATION, "cuda", supports=_fits, **_told)(_run)


_packed_linear, _silu_mul = linear.bind("cuda", packed=True), silu_mul.bind("cuda")


def _packed_adds(call: AddCall[PackedWeight]) -> bool:
    return _is_alike(call) and few_rows.chosen_tile(call.x, call.weight) is not None


def _packed_kernels(call: AddCall[PackedWeight] | ScaledCall[PackedWeight]) -> tuple[Any, ...]:
    return few_rows.linear_kernels(*_factors(call))


@linear_add.implement(few_rows.IMPLEMENTATION, "cuda", supports=_packed_adds, kernels=_packed_kernels, packed=True)
def _packed_add(call: AddCall[PackedWeight]) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias, residual, norm_weight = call
    tile = few_rows.chosen_tile(x, weight)
    assert tile is not None
    rows, residual_rows = (one.reshape(-1, one.shape[-1]) for one in (x, residual))
    product = few_rows.PackedProduct(rows, weight, bias, residual=residual_rows, norm_weight=norm_weight)
    total, weighted, squares = few_rows.multiply(product, tile)
    return total.view(residual.shape), weighted.view(residual.shape), squares.view(*x.shape[:-1], -1)


def _packed_add_parts(call: AddCall[PackedWeight]) -> tuple[str, ...]:
    return (*_packed_linear.launches(*call[:3]), ATEN)


@linear_add.implement("linear, torch", "cuda", kernels=_packed_add_parts, packed=True)
def _packed_add_in_parts(call: AddCall[PackedWeight]) -> tuple[Tensor, Tensor, Tensor]:
    total = _packed_linear(*call[:3]) + call.residual
    return total, total * call.norm_weight, total.float().square().sum(-1, keepdim=True)


def _packed_scales(call: ScaledCall[PackedWeight]) -> bool:
    return _holds_squares(call) and few_rows.chosen_tile(call.weighted, call.weight) is not None


def _packed_scale(gated: bool, call: ScaledCall[PackedWeight]) -> Tensor:
    weighted, squares, eps, weight, bias = call
    tile = few_rows.chosen_tile(weighted, weight)
    assert tile is not None
    rows, row_squares = weighted.reshape(-1, weighted.shape[-1]), squares.view(-1, squares.shape[-1])
    (result,) = few_rows.multiply(few_rows.PackedProduct(rows, weight, bias, row_squares, eps, gated), tile)
    return result.view(*weighted.shape[:-1], result.shape[-1])


def _packed_scale_in_parts(gated: bool, call: ScaledCall[PackedWeight]) -> Tensor:
    weighted, squares, eps, weight, bias = call
    scale = torch.rsqrt(squares.sum(-1, keepdim=True) / weight.shape[1] + eps)
    product: Tensor = _packed_linear((weighted * scale).to(weighted.dtype), weight, bias)
    return _silu_mul(*product.chunk(2, -1)) if gated else product


def _packed_scale_parts(gated: bool, call: ScaledCall[PackedWeight]) -> tuple[str, ...]:
    half, product = scaled_linear_silu_mul.meta(*call), (call.weighted, call.weight, call.bias)
    return (ATEN, *_packed_linear.launches(*product), *(_silu_mul.launches(half, half) if gated else ()))


for _gated, _made in enumerate((scaled_linear, scaled_linear_silu_mul)):
    _made.implement(few_rows.IMPLEMENTATION, "cuda", supports=_packed_scales, kernels=_packed_kernels, packed=True)(
        partial(_packed_scale, bool(_gated))
    )
    _made.implement("linear, torch", "cuda", kernels=partial(_packed_scale_parts, bool(_gated)), packed=True)(
        partial(_packed_scale_in_parts, bool(_gated))
    )
