"""RMS norm whose weights multiply in float32, before the result is rounded: OLMo 2 and 3, Gemma (there as 1 + w)."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.norm.norm import fits, launch_norm, rms_norm_kernel
from strata.kernels.op import operation


def _cost(x: Tensor, weight: Tensor, eps: float, offset: float, *, workload: Workload) -> Cost:
    # Square, add, scale and weight for every element.
    return Cost(flops=4 * x.numel(), read=x.nbytes + weight.nbytes, written=x.nbytes, weights=weight.nbytes)


@operation(_cost, rowwise=True)
def wide_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension (Zhang and Sennrich 2019).

    x [..., width], weight [width] of the same dtype -> [..., width]. All of it is computed in float32 (float64 for
    float64 input) and rounded once, as in transformers' Olmo2RMSNorm (offset 0) and Gemma3RMSNorm (offset 1).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.to(wide.dtype) + offset)).to(x.dtype)


# A row is reduced in an order that depends on its width only.
wide_rms_norm.by_definition("cpu", invariant=True, differentiable=True)


def _triton(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return launch_norm(x, weight, eps, offset=offset)[0]


wide_rms_norm.in_triton(_triton, invariant=True, supports=fits, kernels=(rms_norm_kernel,))
wide_rms_norm.by_definition("cuda", differentiable=True)
