"""Host memory from which the inputs of steps travel to the device, filled again only when they have left it; and small
inputs and outputs on their way, for which neither waits."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class Staging:
    """A host buffer [size] int32, pinned on CUDA; on a CPU steps read it where it lies.

    A copy to the device is done only once the device has come so far, which may be much later than it was asked for.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.host = torch.empty(size, dtype=torch.int32, pin_memory=on_cuda)
        self._device = device
        self._left = torch.cuda.Event() if on_cuda else None

    def target(self, size: int) -> Tensor:
        """Where the first `size` elements will be read: new memory on the device."""
        if self._left is None and self._device.type == "cpu":
            return self.host[:size]
        return torch.empty(size, dtype=torch.int32, device=self._device)

    def wait(self) -> None:
        """Block until all that was sent has left the buffer, so that it may be filled."""
        if self._left is not None:
            self._left.synchronize()

    def send(self, target: Tensor) -> None:
        """Copy as many elements as the target has, once the device has done what it was given before."""
        if self._device.type != "cpu":
            target.copy_(self.host[: len(target)], non_blocking=True)
        if self._left is not None:
            self._left.record()


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
