"""Values of the format MXFP4 (OCP Microscaling Formats specification 1.0, 2023): 4 bits each and shared scales."""

from __future__ import annotations

import torch
from torch import Tensor

# Values that share a scale.
GROUP = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Of an E8M0 scale, 2^(s - 127).
_BIAS = 127


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., groups, 16] uint8, two values each, the low half first; scales [..., groups] uint8 -> [..., 32 *
    groups] float32, which holds each value exactly unless it is too large.
    """
    values = torch.tensor([*_MAGNITUDES, *(-one for one in _MAGNITUDES)])
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    scaled = torch.ldexp(values[halves.long()], scales.int()[..., None] - _BIAS)
    return scaled.flatten(-2)
