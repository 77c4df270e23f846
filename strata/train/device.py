"""The device of a run, from its name in the config."""

from __future__ import annotations

import torch


def training_device(name: str) -> torch.device:
    """CUDA for "auto" if there is one, else the CPU. Raises ValueError for CUDA where there is none."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: this machine has no CUDA device; use 'cpu' or 'auto'")
    return device
