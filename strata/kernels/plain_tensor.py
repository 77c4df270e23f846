"""Whether kernels may take tensors by their addresses."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def all_plain(*tensors: Tensor) -> bool:
    """Tensors of this process's device and no subclass, such as a DTensor, whose memory is only a part of it."""
    return all(type(tensor) in (Tensor, nn.Parameter) and tensor.dtype != torch.float64 for tensor in tensors)
