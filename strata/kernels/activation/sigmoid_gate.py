"""A result times the sigmoid of its gate: gated attention (Qiu et al. 2025), and experts that all tokens go to."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.op import operation


def _cost(x: Tensor, gate: Tensor, *, workload: Workload) -> Cost:
    # A sigmoid is negation, exponential, sum and quotient; then the product.
    return Cost(flops=x.numel() + 4 * gate.numel(), read=x.nbytes + gate.nbytes, written=x.nbytes)


@operation(_cost, rowwise=True)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`, the sigmoid rounded first, as transformers' Qwen3NextAttention does.

    x: [..., width], gate: [..., width] or [..., 1], of one dtype -> like x.
    """
    return x * torch.sigmoid(gate)


def _blocks(x: Tensor, gate: Tensor) -> Tensor:
    return x * in_whole_vectors(gate, torch.sigmoid_)


sigmoid_gate.implement("torch", "cpu", differentiable=True)(sigmoid_gate.reference)
sigmoid_gate.implement("blocks", "cpu", invariant=True)(_blocks)
sigmoid_gate.implement("torch", "cuda", invariant=True, differentiable=True)(sigmoid_gate.reference)
