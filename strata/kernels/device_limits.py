"""Whether a CUDA device can run Strata's own kernels, told by its properties before any of them is launched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from strata.kernels.triton_import import HAS_TRITON

# Ampere: the first with bfloat16 products and asynchronous copies.
LEAST_CAPABILITY = (8, 0)
# What the tiles may take of a multiprocessor: all that Hopper has. tests/kernels/test_compile.py holds them to it.
SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class DeviceLimits:
    """product: its name; capability: (major, minor); shared_bytes: the most shared memory that one program may have."""

    product: str
    capability: tuple[int, int]
    shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> DeviceLimits:
        properties = torch.cuda.get_device_properties(device)
        shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in the stubs
        return cls(properties.name, (properties.major, properties.minor), shared)


def why_not(limits: DeviceLimits, has_triton: bool = HAS_TRITON) -> str | None:
    """Why the own kernels cannot run on a CUDA device, in one line; None if they can."""
    if not has_triton:
        return "Triton is not installed"
    if limits.capability < LEAST_CAPABILITY:
        had, wanted = (".".join(map(str, version)) for version in (limits.capability, LEAST_CAPABILITY))
        return f"{limits.product} has compute capability {had}, and the kernels need {wanted}"
    if limits.shared_bytes < SHARED_BYTES:
        return (
            f"{limits.product} has {limits.shared_bytes // 1024} KiB of shared memory for a program, and the kernels "
            f"need {SHARED_BYTES // 1024}"
        )
    return None


@cache
def implementations_for(device: torch.device) -> str:
    """For what `Operation.bind` is to bind on a device: its type, or "reference" where the own kernels cannot run."""
    if device.type == "cuda" and HAS_TRITON and why_not(DeviceLimits.of(device)) is not None:
        return "reference"
    return device.type
