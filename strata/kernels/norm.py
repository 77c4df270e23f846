"""Root-mean-square layer normalization (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation


def _cost(x: Tensor, weight: Tensor, eps: float, *, workload: Workload) -> Cost:
    # Square, add, scale and weight for every element.
    return Cost(flops=4 * x.numel(), read=x.nbytes + weight.nbytes, written=x.nbytes, weights=weight.nbytes)


def _meta(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape, device="meta")


@operation(_cost, meta=_meta)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    x [..., width], weight [width] of the same dtype -> [..., width]. Computed in float32 (float64 for float64 input)
    and rounded to x.dtype before the multiplication by the weight, which is the order of transformers' LlamaRMSNorm.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


@rms_norm.implement("torch", "cpu", invariant=True)
def _torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # ATen reduces each row alone, in an order that depends on the width only. In 16 bits its fused form would multiply
    # by the weight before it rounds, so the weight is applied apart.
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape, None, eps).mul_(weight)
