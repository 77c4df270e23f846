"""Small inputs and outputs of a step on their way between host and device, without either waiting for the other."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(device: torch.device, **arrays: NDArray[Any]) -> dict[str, Tensor]:
    """One-dimensional arrays of four-byte numbers (int32, float32) as tensors on a device, in one copy from pinned
    memory, which PyTorch keeps until the copy is done."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if device.type == "cpu":
        return tensors
    packed = torch.cat([tensor.view(torch.int32) for tensor in tensors.values()])
    if device.type == "cuda":
        packed = packed.pin_memory()
    parts = packed.to(device, non_blocking=True).split([len(array) for array in arrays.values()])
    return {name: part.view(tensors[name].dtype) for name, part in zip(arrays, parts, strict=True)}


def fetch(tensor: Tensor) -> Tensor:
    """A tensor on the host, in pinned memory, filled once the device has come so far (an event tells)."""
    return tensor.to("cpu", non_blocking=True)
