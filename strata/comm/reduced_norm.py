"""The sum over ranks, the residual and the norm of what is added up: where a block of a divided model ends. Alone, or
with the product that each rank has a part of."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strata.comm.all_reduce_cuda import fits_flagged_norm, fits_one_shot_norm, flagged_norm, one_shot_norm
from strata.comm.mesh import Axis
from strata.comm.operations import Along, all_reduce
from strata.comm.sent_product_cuda import fits_sent_product, sent_product_kernels, sent_product_norm
from strata.kernels.collective.all_reduce import one_shot_norm_kernel
from strata.kernels.collective.flagged import flagged_norm_kernel
from strata.kernels.fused import Run, fused
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import add_rms_norm
from strata.kernels.triton_import import HAS_TRITON


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


def _apart(x: Tensor, axis: Axis, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, normed = add_rms_norm.bind("cuda")(all_reduce.bind("cuda")(x, axis), residual, weight, eps)
    return total, normed


def _kernels_apart(x: Tensor, axis: Axis, residual: Tensor, weight: Tensor, eps: float) -> tuple[str, ...]:
    return all_reduce.bind("cuda").launches(x, axis) + add_rms_norm.bind("cuda").launches(x, residual, weight, eps)


if HAS_TRITON:
    all_reduce_add_rms_norm.implement("one shot", "cuda", supports=fits_one_shot_norm, kernels=(one_shot_norm_kernel,))(
        one_shot_norm
    )
    _flagged = all_reduce_add_rms_norm.implement(
        "one shot, flags", "cuda", supports=fits_flagged_norm, kernels=(flagged_norm_kernel,)
    )
    _flagged(flagged_norm)
all_reduce_add_rms_norm.implement("apart", "cuda", kernels=_kernels_apart)(_apart)


@fused(rowwise=True, collective=True, dense=True)
def linear_all_reduce_add_rms_norm(
    run: Run, x: Tensor, along: Along | Axis, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`all_reduce_add_rms_norm` of `linear`, the product of each rank's part of the width.

    x [rows, width], weight [out, width], residual [rows, out], norm_weight [out] of one dtype -> two tensors like
    residual. The product is rounded before it is added up.
    """
    total, normed = run(all_reduce_add_rms_norm, run(linear, x, weight), along, residual, norm_weight, eps)
    return total, normed


_linear, _reduced = linear.bind("cuda"), all_reduce_add_rms_norm.bind("cuda")


def _product_apart(
    x: Tensor, axis: Axis, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total, normed = _reduced(_linear(x, weight), axis, residual, norm_weight, eps)
    return total, normed


def _product_kernels_apart(
    x: Tensor, axis: Axis, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[str, ...]:
    # The product has the shape and dtype of the residual.
    return _linear.launches(x, weight) + _reduced.launches(residual, axis, residual, norm_weight, eps)


def _product_scratch(x: Tensor, axis: Axis, weight: Tensor, residual: Tensor, *_: Any) -> int:
    return _linear.scratch(x, weight) + residual.nbytes


linear_all_reduce_add_rms_norm.in_triton(
    sent_product_norm, "one shot", supports=fits_sent_product, kernels=sent_product_kernels
)
linear_all_reduce_add_rms_norm.implement("apart", "cuda", kernels=_product_kernels_apart, scratch=_product_scratch)(
    _product_apart
)
