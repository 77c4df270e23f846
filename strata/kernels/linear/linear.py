"""The dense layer: `x @ weight^T + bias`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.device_limits import implementations_for
from strata.kernels.linear import cublaslt, fixed, measured_algorithms
from strata.kernels.linear.packed.frozen import frozen_product
from strata.kernels.linear.packed.many_rows import implement_many_rows
from strata.kernels.linear.skinny import SkinnyProduct, implement_few_rows
from strata.kernels.op import CUBLAS, operation
from strata.kernels.quant.packed import PackedWeight, dense, packed_product, round_activations


def _cost(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None, *, workload: Workload) -> Cost:
    out, width = weight.shape
    rows = x.numel() // width
    weights = weight.nbytes + (0 if bias is None else bias.nbytes)
    # What rounds activations: their largest magnitudes and a multiplication. Few rows on CUDA go without.
    rounding = 3 * x.numel() if isinstance(weight, PackedWeight) and weight.activations else 0
    return Cost(
        flops=2 * rows * width * out + (0 if bias is None else rows * out) + rounding,
        read=x.nbytes + weights,
        written=rows * out * x.element_size(),
        weights=weights,
    )


def _meta(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), device="meta")


@operation(_cost, meta=_meta, rowwise=True, product=True, packable=(1,))
def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`: x [..., width], weight [out, width], bias [out] or None -> [..., out]; one dtype.

    A packed weight counts as what it stands for, and x as its scheme rounds it. On CUDA many rows of x are
    rounded, where both operands can be multiplied in 8 bits; others are used as they are.
    """
    if isinstance(weight, PackedWeight):
        return packed_product(x, weight, bias)
    return F.linear(x, weight, bias)


linear.implement("torch", "cpu", differentiable=True)(F.linear)
linear.implement("fixed tiles", "cpu", invariant=True)(fixed.buffered_linear)


@linear.implement("unpacked, fixed tiles", "cpu", invariant=True, packed=True)
def _unpacked(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    product = fixed.buffered_linear(round_activations(x, weight.scheme, weight.input_scale), dense(weight)).to(x.dtype)
    return product if bias is None else product + bias


def _product(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> SkinnyProduct:
    return SkinnyProduct(x.reshape(-1, x.shape[-1]), weight, bias)


implement_few_rows(linear, _product)
linear.implement("cublaslt measured", "cuda", supports=measured_algorithms.supports, kernels=(CUBLAS,))(
    measured_algorithms.measured_linear
)
linear.implement("cublas", "cuda", differentiable=True, kernels=(CUBLAS,))(F.linear)
linear.implement(cublaslt.IMPLEMENTATION, "cuda", invariant=True, supports=cublaslt.supports, kernels=(CUBLAS,))(
    cublaslt.cublaslt_linear
)
linear.in_triton(fixed.triton_linear, invariant=True, supports=fixed.fits, kernels=(fixed.linear_kernel,))
implement_many_rows(linear)


@linear.implement("of a frozen weight", "cpu", differentiable=True, packed=True)
@linear.implement("of a frozen weight", "cuda", differentiable=True, packed=True)
def _frozen(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    kind = "reference" if x.device.type == "cpu" else implementations_for(x.device)
    return frozen_product(linear.bind(kind, packed=True), x, weight, bias)
