"""Rotary position embedding of the first dimensions of each head; the others stay (GPT-NeoX, Black et al. 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation
from strata.kernels.rotary.rope import rope


def _cost(x: Tensor, cos: Tensor, sin: Tensor, *, workload: Workload) -> Cost:
    rotated = x.numel() // x.shape[-1] * cos.shape[-1]
    return Cost(flops=3 * rotated, read=x.nbytes + (cos.nbytes + sin.nbytes) // 2, written=x.nbytes)


@operation(_cost, rowwise=True)
def partial_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rope` of the first dimensions of each head, as many as the angles have.

    x [tokens, heads, head_dim], cos and sin [tokens, 1, dims] of `rope_angles`, dims <= head_dim -> like x.
    """
    dims = cos.shape[-1]
    return torch.cat((rope.reference(x[..., :dims], cos, sin), x[..., dims:]), -1)


for _device in ("cpu", "cuda"):
    partial_rope.implement("torch", _device, invariant=True, differentiable=True)(partial_rope.reference)
