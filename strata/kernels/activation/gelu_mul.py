"""The gated activation of GEGLU layers (Shazeer 2020): `gelu(gate) * up`, gelu by its tanh approximation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.activation.silu_mul import implement_by_rows
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


def _cost(gate: Tensor, up: Tensor, *, workload: Workload) -> Cost:
    # x * sigmoid(2 y) with y = a * (x + b * x^3): three products and a sum, and what a silu takes; then the product.
    return Cost(flops=9 * gate.numel(), read=gate.nbytes + up.nbytes, written=gate.nbytes)


@operation(_cost, rowwise=True)
def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) * up`: gate and up [..., width] of one dtype -> [..., width].

    gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016) is computed in float32
    and rounded to the dtype before the product, as transformers does.
    """
    return F.gelu(gate, approximate="tanh") * up


gelu_mul.by_definition("cpu", differentiable=True)


@gelu_mul.implement("blocks", "cpu", invariant=True)
def _blocks(gate: Tensor, up: Tensor) -> Tensor:
    return in_whole_vectors(gate, lambda block: block.copy_(F.gelu(block, approximate="tanh"))).mul_(up)


@jit
def gelu_mul_kernel(gate, up, result, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < width
    opening = tl.load(gate + row * gate_stride + column, mask=held, other=0.0)
    wide = opening.to(tl.float32)
    # (1 + tanh(y)) / 2 is the sigmoid of 2 y.
    inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
    gelu = (wide / (1 + tl.exp(-inner))).to(opening.dtype).to(tl.float32)
    value = tl.load(up + row * up_stride + column, mask=held, other=0.0).to(tl.float32)
    tl.store(result + row * width + column, (gelu * value).to(opening.dtype), mask=held)


implement_by_rows(gelu_mul, gelu_mul_kernel)
