"""How much memory a device can still give, and a clear error before a model asks for more."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a CUDA device or on the host; None where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kibibytes is None else int(kibibytes) * 1024


def require_memory(needed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if a model of `needed` bytes with weights of `dtype` does not fit in the free memory."""
    free = free_bytes(device)
    if free is not None and needed > free:
        raise ValueError(
            f"the model needs {needed / 2**30:.2f} GiB as {str(dtype).removeprefix('torch.')}, and {device} has "
            f"{free / 2**30:.2f} GiB free; free memory there, choose a dtype of fewer bytes, or a smaller model"
        )
