"""From the host to the device, without the host waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, by way of pinned memory: the copy is enqueued as a kernel is. On a CPU the
    tensor itself.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
