"""Whether a CUDA device can run Strata's own kernels, known by its properties before any of them is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from strata.hardware.figures import Device
from strata.kernels.triton_import import HAS_TRITON

# Ampere: the first with bfloat16 products and asynchronous copies.
MIN_CAPABILITY = (8, 0)
# What the tiles may take of a multiprocessor: all that Hopper has. tests/kernels/test_compile.py holds them to it.
SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class DeviceLimits:
    """product: its name; capability: (major, minor); shared_bytes: the most shared memory that one program may have;
    processors: how many programs of that size run at once."""

    product: str
    capability: tuple[int, int]
    shared_bytes: int
    processors: int

    @staticmethod
    def of(device: torch.device | DeviceLimits) -> DeviceLimits:
        """Those of a CUDA device; of a tensor that is `as_if_on` a device, its own."""
        return device if isinstance(device, DeviceLimits) else _limits(device)

    @staticmethod
    def listed(device: Device) -> DeviceLimits:
        """Those of a device in the database. Raises ValueError if it runs no CUDA kernels."""
        if device.cuda is None:
            raise ValueError(
                f"{device.product} runs no CUDA kernels, and Strata has no others of its own: give a GPU of NVIDIA's, "
                "such as h200"
            )
        cuda = device.cuda
        return DeviceLimits(device.product, cuda.capability, cuda.shared_bytes, cuda.processors)


_MEANT_BY_META: ContextVar[DeviceLimits] = ContextVar("meant_by_meta")


@contextmanager
def meta_means(limits: DeviceLimits) -> Iterator[None]:
    """Inside, tensors on the meta device stand for those of a CUDA device: the same kernels are chosen.

    For a process of its own, since what is chosen for a device is kept.
    """
    implementations_for.cache_clear()
    token = _MEANT_BY_META.set(limits)
    try:
        yield
    finally:
        _MEANT_BY_META.reset(token)
        implementations_for.cache_clear()
        _limits.cache_clear()


@cache
def _limits(device: torch.device) -> DeviceLimits:
    if device.type == "meta":
        return _MEANT_BY_META.get()
    properties = torch.cuda.get_device_properties(device)
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in the stubs
    return DeviceLimits(properties.name, (properties.major, properties.minor), shared, properties.multi_processor_count)


class _AsIfOn(Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    limits: DeviceLimits

    @property
    def device(self) -> DeviceLimits:  # type: ignore[override]
        return self.limits


def as_if_on(limits: DeviceLimits, tensor: Tensor) -> Tensor:
    """A tensor on the meta device for an implementation to be chosen by: its `device` is what another one can do."""
    placed = tensor.as_subclass(_AsIfOn)
    placed.limits = limits
    return placed


def stands_in(tensor: Tensor) -> bool:
    """Whether it is `as_if_on` a device."""
    return isinstance(tensor, _AsIfOn)


def why_not(limits: DeviceLimits, has_triton: bool = HAS_TRITON) -> str | None:
    """Why the own kernels cannot run on a CUDA device, in one line; None if they can."""
    if not has_triton:
        return "Triton is not installed"
    if limits.capability < MIN_CAPABILITY:
        had, wanted = (".".join(map(str, version)) for version in (limits.capability, MIN_CAPABILITY))
        return f"{limits.product} has compute capability {had}, and the kernels need {wanted}"
    if limits.shared_bytes < SHARED_BYTES:
        return (
            f"{limits.product} has {limits.shared_bytes // 1024} KiB of shared memory for a program, and the kernels "
            f"need {SHARED_BYTES // 1024}"
        )
    return None


@cache
def implementations_for(device: torch.device | DeviceLimits) -> str:
    """For what `Operation.bind` is to bind on a device: its type, or "reference" where the own kernels cannot run."""
    kind = "cuda" if isinstance(device, DeviceLimits) else device.type
    if kind == "meta" and _MEANT_BY_META.get(None) is not None:
        kind = "cuda"
    if kind == "cuda" and HAS_TRITON and why_not(DeviceLimits.of(device)) is not None:
        return "reference"
    return kind
