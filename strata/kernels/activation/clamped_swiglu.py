"""The gated activation of gpt-oss (OpenAI 2025): a SwiGLU (Shazeer 2020) of bounded inputs, times up + 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.op import operation


class Clamp(NamedTuple):
    """alpha: what the gate is multiplied by inside the sigmoid. limit: the most of a gate, and of |up|."""

    alpha: float
    limit: float


def _cost(gate: Tensor, up: Tensor, clamp: Clamp, *, workload: Workload) -> Cost:
    # Three bounds, a product and four operations of a sigmoid, its product with the gate, the sum and the last product.
    return Cost(flops=11 * gate.numel(), read=gate.nbytes + up.nbytes, written=gate.nbytes)


@operation(_cost, rowwise=True)
def clamped_swiglu(gate: Tensor, up: Tensor, clamp: Clamp) -> Tensor:
    """`g * sigmoid(alpha * g) * (u + 1)` with g = min(gate, limit) and u = up within -limit and limit.

    gate, up: [..., width] of one dtype -> [..., width], computed in float32 (float64 for float64) and rounded once.
    """
    return _gated(gate, up, clamp, torch.sigmoid)


def _gated(gate: Tensor, up: Tensor, clamp: Clamp, sigmoid: Callable[[Tensor], Tensor]) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    bounded = gate.to(wide).clamp(max=clamp.limit)
    factor = up.to(wide).clamp(-clamp.limit, clamp.limit) + 1
    return (bounded * sigmoid(clamp.alpha * bounded) * factor).to(gate.dtype)


def _blocks(gate: Tensor, up: Tensor, clamp: Clamp) -> Tensor:
    return _gated(gate, up, clamp, lambda x: in_whole_vectors(x, torch.sigmoid_))


clamped_swiglu.by_definition("cpu", differentiable=True)
clamped_swiglu.implement("blocks", "cpu", invariant=True)(_blocks)
clamped_swiglu.by_definition("cuda", invariant=True, differentiable=True)
