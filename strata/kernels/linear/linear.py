"""The dense layer: `x @ weight^T + bias`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.linear import cublaslt, fixed, measured_algorithms, skinny, skinny_tiles, tile_choice
from strata.kernels.op import CUBLAS, operation
from strata.kernels.triton_import import HAS_TRITON


def _cost(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, workload: Workload) -> Cost:
    out, width = weight.shape
    rows = x.numel() // width
    weights = weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(
        flops=2 * rows * width * out + (0 if bias is None else rows * out),
        read=x.nbytes + weights,
        written=rows * out * x.element_size(),
        weights=weights,
    )


def _meta(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), device="meta")


@operation(_cost, meta=_meta, rowwise=True, product=True)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`: x [..., width], weight [out, width], bias [out] or None -> [..., out]; one dtype."""
    return F.linear(x, weight, bias)


linear.implement("torch", "cpu", differentiable=True)(F.linear)
linear.implement("fixed tiles", "cpu", invariant=True)(fixed.buffered_linear)


def _has_tile(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return tile_choice.chosen_tile(linear.name, x, weight) is not None


def _kernels(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
    return skinny.kernels_of(tile_choice.chosen_tile(linear.name, x, weight))


@linear.implement(skinny_tiles.IMPLEMENTATION, "cuda", supports=_has_tile, kernels=_kernels)
def _skinny(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    tile = tile_choice.chosen_tile(linear.name, x, weight)
    assert tile is not None
    return skinny.skinny_linear(x, weight, bias, tile)


linear.implement("cublaslt measured", "cuda", supports=measured_algorithms.supports, kernels=(CUBLAS,))(
    measured_algorithms.measured_linear
)
linear.implement("cublas", "cuda", differentiable=True, kernels=(CUBLAS,))(F.linear)
linear.implement(cublaslt.IMPLEMENTATION, "cuda", invariant=True, supports=cublaslt.supports, kernels=(CUBLAS,))(
    cublaslt.cublaslt_linear
)
if HAS_TRITON:
    linear.implement("triton", "cuda", invariant=True, supports=fixed.fits, kernels=(fixed.linear_kernel,))(
        fixed.triton_linear
    )
