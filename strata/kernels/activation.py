"""The gated activation of SwiGLU layers (Shazeer 2020): `silu(gate) * up`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation


def _cost(gate: Tensor, up: Tensor, *, workload: Workload) -> Cost:
    # silu(g) = g / (1 + exp(-g)) is a negation, an exponential, an addition and a division; then the product.
    return Cost(flops=5 * gate.numel(), read=gate.nbytes + up.nbytes, written=gate.nbytes)


def _meta(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape, device="meta")


@operation(_cost, meta=_meta)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`: gate and up [..., width] of one dtype -> [..., width].

    silu is computed in float32 and rounded to the dtype before the product, as transformers does.
    """
    return F.silu(gate) * up


@silu_mul.implement("torch", "cpu")
def _torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate).mul_(up)


# ATen computes in vectors of up to 64 elements and the rest of a call one by one, with another exponential. It divides
# calls of 32768 elements and more among threads.
_VECTOR = 64
_BLOCK = 16384


@silu_mul.implement("blocks", "cpu", invariant=True)
def _blocks(gate: Tensor, up: Tensor) -> Tensor:
    """In blocks that one thread computes in whole vectors, so that no element's bits depend on its place."""
    count = gate.numel()
    flat = gate.new_zeros(-(-count // _VECTOR) * _VECTOR)
    flat[:count].view(gate.shape).copy_(gate)
    for block in flat.split(_BLOCK):
        F.silu(block, inplace=True)
    return flat[:count].view(gate.shape).mul_(up)
