"""The sum over ranks, the residual and the norm of what is added up: where a block of a divided model ends. Alone, or
with the product that each rank has a part of."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strata.comm.all_reduce_cuda import (
    fits_flag_norm,
    fits_gemm_reduce,
    fits_one_shot_norm,
    flag_norm,
    gemm_all_reduce_kernels,
    gemm_all_reduce_norm,
    one_shot_norm,
)
from strata.comm.mesh import Axis
from strata.comm.operations import Along, all_reduce
from strata.kernels.collective.all_reduce import one_shot_norm_kernel
from strata.kernels.collective.one_shot_flags import flag_norm_kernel
from strata.kernels.fused import Run, fused
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import add_rms_norm


@fused(rowwise=True, collective=True)
def all_reduce_add_rms_norm(
    run: Run, x: Tensor, along: Along | Axis, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of x over the ranks and residual, and `rms_norm` of that.

    x, residual [rows, width], weight [width] of one dtype -> two tensors like x. The sum over the ranks is rounded to
    x.dtype before the residual is added, and that sum before it is normalized.
    """
    total, normed = run(add_rms_norm, run(all_reduce, x, along), residual, weight, eps)
    return total, normed


for _run, _name, _supports, _kernel in (
    (one_shot_norm, "one shot", fits_one_shot_norm, one_shot_norm_kernel),
    (flag_norm, "one shot, flags", fits_flag_norm, flag_norm_kernel),
):
    all_reduce_add_rms_norm.in_triton(_run, _name, supports=_supports, kernels=(_kernel,))
all_reduce_add_rms_norm.unfused("apart", "cuda")


@fused(rowwise=True, collective=True, dense=True, tuned_as=linear.name)
def linear_all_reduce_add_rms_norm(
    run: Run, x: Tensor, along: Along | Axis, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`all_reduce_add_rms_norm` of `linear`, the product of each rank's part of the width.

    x [rows, width], weight [out, width], residual [rows, out], norm_weight [out] of one dtype -> two tensors like
    residual. The product is rounded before it is added up.
    """
    total, normed = run(all_reduce_add_rms_norm, run(linear, x, weight), along, residual, norm_weight, eps)
    return total, normed


def _product_scratch(x: Tensor, axis: Axis, weight: Tensor, residual: Tensor, *_: Any) -> int:
    return linear.bind("cuda").scratch(x, weight) + residual.nbytes


linear_all_reduce_add_rms_norm.in_triton(
    gemm_all_reduce_norm, "one shot", supports=fits_gemm_reduce, kernels=gemm_all_reduce_kernels
)
linear_all_reduce_add_rms_norm.unfused("apart", "cuda", scratch=_product_scratch)
