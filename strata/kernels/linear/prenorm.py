"""Linear layers around an RMS norm (Zhang and Sennrich 2019) whose scale moves from the product's input to its output.

A norm multiplies each row by one number, and so does not care on which side of the next product it does so. What needs
no look at a whole row (the residual addition, the norm's weights, sums of squares over blocks of columns) happens where
the row is made, `linear_add`; the scale is applied where the row is read, to the product: `scaled_linear`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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

Weight = Tensor | PackedWeight

# A program reads the squares of whole rows at once.
_MOST_BLOCKS = 2048


def _add_cost(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    *,
    workload: Workload,
) -> Cost:
    elements = residual.numel()
    product = linear.cost(x, weight, bias, workload=workload)
    # The addition, the norm's weight, and a square that is added up. The product itself is not written, its sum is.
    return product + Cost(
        flops=4 * elements,
        read=residual.nbytes + norm_weight.nbytes,
        written=residual.nbytes + 4 * (elements // weight.shape[0]),
        weights=norm_weight.nbytes,
    )


def _add_meta(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    total, weighted = (residual.new_empty(residual.shape, device="meta") for _ in range(2))
    return total, weighted, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32, device="meta")


@operation(_add_cost, meta=_add_meta, rowwise=True, packable=(1,), dense=True)
def linear_add(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`x @ weight^T + bias + residual`, and what the norm of that sum is made from.

    x [..., width], weight [out, width], bias [out] or None, residual [..., out], norm_weight [out]; one dtype ->
    total [..., out]; weighted [..., out], total * norm_weight; squares [..., blocks] float32, the sums of squares of
    `total` over blocks of its columns. How many blocks depends on the implementation.
    """
    total = linear.reference(x, weight, bias) + residual
    wide = torch.promote_types(total.dtype, torch.float32)
    return total, total * norm_weight, total.to(wide).square().sum(-1, keepdim=True)


def _scaled_cost(
    weighted: Tensor,
    squares: Tensor,
    eps: float,
    weight: Weight,
    bias: Tensor | None,
    *,
    workload: Workload,
) -> Cost:
    product = linear.cost(weighted, weight, bias, workload=workload)
    return product + Cost(flops=weighted.numel() // weight.shape[1] * weight.shape[0], read=squares.nbytes)


def _scaled_meta(weighted: Tensor, squares: Tensor, eps: float, weight: Weight, bias: Tensor | None) -> Tensor:
    return weighted.new_empty((*weighted.shape[:-1], weight.shape[0]), device="meta")


@operation(_scaled_cost, meta=_scaled_meta, rowwise=True, packable=(3,), dense=True)
def scaled_linear(weighted: Tensor, squares: Tensor, eps: float, weight: Weight, bias: Tensor | None) -> Tensor:
    """`(weighted @ weight^T) / sqrt(sum(squares) / width + eps) + bias`: the linear layer after a norm.

    weighted [..., width] and squares [..., blocks] float32 as `linear_add` makes them, eps of the norm,
    weight [out, width], bias [out] or None -> [..., out].
    """
    scale = torch.rsqrt(squares.sum(-1, keepdim=True) / weight.shape[1] + eps)
    # Scaled before the product, which rounds to the dtype: not once more after it.
    product: Tensor = linear.reference((weighted * scale).to(weighted.dtype), weight, bias)
    return product


@fused(rowwise=True, packable=(3,), dense=True)
def scaled_linear_silu_mul(
    run: Run, weighted: Tensor, squares: Tensor, eps: float, weight: Weight, bias: Tensor | None
) -> Tensor:
    """`silu_mul` of the two halves of `scaled_linear`.

    As `scaled_linear`, with weight [2 * inner, width] (and bias) the rows of the gate and then those of `up`
    -> [..., inner].
    """
    gate, up = run(scaled_linear, weighted, squares, eps, weight, bias).chunk(2, -1)
    result: Tensor = run(silu_mul, gate, up)
    return result


def _adds(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor) -> bool:
    return (
        chosen_tile(linear_add.name, x, weight) is not None
        and residual.dtype == norm_weight.dtype == x.dtype
        and residual.stride(-1) == 1
    )


def _adds_skinny(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    tile = chosen_tile(linear_add.name, x, weight)
    assert tile is not None
    residual_rows = residual.reshape(-1, residual.shape[-1])
    product = SkinnyProduct(x.reshape(-1, x.shape[-1]), weight, bias, residual=residual_rows, norm_weight=norm_weight)
    total, weighted, squares = multiply(product, tile)
    return total.view(residual.shape), weighted.view(residual.shape), squares.view(*x.shape[:-1], -1)


def _scales(operation: str, weighted: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> bool:
    fits = squares.shape[-1] <= _MOST_BLOCKS and squares.is_contiguous()
    return fits and chosen_tile(operation, weighted, weight) is not None


def _scales_skinny(
    operation: str, weighted: Tensor, squares: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    tile = chosen_tile(operation, weighted, weight)
    assert tile is not None
    rows, row_squares = weighted.reshape(-1, weighted.shape[-1]), squares.view(-1, squares.shape[-1])
    gated = operation == scaled_linear_silu_mul.name
    (result,) = multiply(SkinnyProduct(rows, weight, bias, row_squares, eps, gated), tile)
    return result.view(*weighted.shape[:-1], result.shape[-1])


def _add_kernels(x: Tensor, weight: Tensor, *_: Any) -> tuple[Any, ...]:
    return kernels_of(chosen_tile(linear_add.name, x, weight))


def _scale_kernels(operation: str, weighted: Tensor, _: Any, eps: float, weight: Tensor, __: Any) -> tuple[Any, ...]:
    return kernels_of(chosen_tile(operation, weighted, weight))


def _add_scratch(x: Tensor, weight: Tensor, *_: Any) -> int:
    return scratch_bytes(chosen_tile(linear_add.name, x, weight), x.numel() // weight.shape[1], weight.shape[0])


def _scale_scratch(operation: str, weighted: Tensor, _: Any, eps: float, weight: Tensor, __: Any) -> int:
    tile, count = chosen_tile(operation, weighted, weight), weighted.numel() // weight.shape[1]
    return scratch_bytes(tile, count, weight.shape[0])


if HAS_TRITON:
    linear_add.implement(IMPLEMENTATION, "cuda", supports=_adds, kernels=_add_kernels, scratch=_add_scratch)(
        _adds_skinny
    )
    for _made in (scaled_linear, scaled_linear_silu_mul):
        _run, _fits = partial(_scales_skinny, _made.name), partial(_scales, _made.name)
        _told: dict[str, Any] = {
            "kernels": partial(_scale_kernels, _made.name),
            "scratch": partial(_scale_scratch, _made.name),
        }
        _made.implement(IMPLEMENTATION, "cuda", supports=_fits, **_told)(_run)


_packed_linear, _silu_mul = linear.bind("cuda", packed=True), silu_mul.bind("cuda")


def _packed_adds(x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor, norm_weight: Tensor) -> bool:
    same = residual.dtype == norm_weight.dtype == x.dtype and residual.stride(-1) == 1
    return same and few_rows.chosen_tile(x, weight) is not None


def _packed_add_kernels(x: Tensor, weight: PackedWeight, *_: Any) -> tuple[Any, ...]:
    return few_rows.linear_kernels(x, weight)


@linear_add.implement(few_rows.IMPLEMENTATION, "cuda", supports=_packed_adds, kernels=_packed_add_kernels, packed=True)
def _packed_add(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    tile = few_rows.chosen_tile(x, weight)
    assert tile is not None
    rows, residual_rows = (one.reshape(-1, one.shape[-1]) for one in (x, residual))
    product = few_rows.PackedProduct(rows, weight, bias, residual=residual_rows, norm_weight=norm_weight)
    total, weighted, squares = few_rows.multiply(product, tile)
    return total.view(residual.shape), weighted.view(residual.shape), squares.view(*x.shape[:-1], -1)


def _packed_add_parts(x: Tensor, weight: PackedWeight, bias: Tensor | None, *_: Tensor) -> tuple[str, ...]:
    return (*_packed_linear.launches(x, weight, bias), ATEN)


@linear_add.implement("linear, torch", "cuda", kernels=_packed_add_parts, packed=True)
def _packed_add_in_parts(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    total = _packed_linear(x, weight, bias) + residual
    return total, total * norm_weight, total.float().square().sum(-1, keepdim=True)


def _packed_scales(weighted: Tensor, squares: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None) -> bool:
    fits = squares.shape[-1] <= _MOST_BLOCKS and squares.is_contiguous()
    return fits and few_rows.chosen_tile(weighted, weight) is not None


def _packed_scale_kernels(weighted: Tensor, _: Any, eps: float, weight: PackedWeight, __: Any) -> tuple[Any, ...]:
    return few_rows.linear_kernels(weighted, weight)


def _packed_scale(
    gated: bool, weighted: Tensor, squares: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    tile = few_rows.chosen_tile(weighted, weight)
    assert tile is not None
    rows, row_squares = weighted.reshape(-1, weighted.shape[-1]), squares.view(-1, squares.shape[-1])
    (result,) = few_rows.multiply(few_rows.PackedProduct(rows, weight, bias, row_squares, eps, gated), tile)
    return result.view(*weighted.shape[:-1], result.shape[-1])


def _packed_scale_in_parts(
    gated: bool, weighted: Tensor, squares: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None
) -> Tensor:
    scale = torch.rsqrt(squares.sum(-1, keepdim=True) / weight.shape[1] + eps)
    product: Tensor = _packed_linear((weighted * scale).to(weighted.dtype), weight, bias)
    return _silu_mul(*product.chunk(2, -1)) if gated else product


def _packed_scale_parts(
    gated: bool, weighted: Tensor, squares: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None
) -> tuple[str, ...]:
    half = scaled_linear_silu_mul.meta(weighted, squares, eps, weight, bias)
    return (ATEN, *_packed_linear.launches(weighted, weight, bias), *(_silu_mul.launches(half, half) if gated else ()))


for _gated, _made in enumerate((scaled_linear, scaled_linear_silu_mul)):
    _made.implement(
        few_rows.IMPLEMENTATION, "cuda", supports=_packed_scales, kernels=_packed_scale_kernels, packed=True
    )(partial(_packed_scale, bool(_gated)))
    _made.implement("linear, torch", "cuda", kernels=partial(_packed_scale_parts, bool(_gated)), packed=True)(
        partial(_packed_scale_in_parts, bool(_gated))
    )
