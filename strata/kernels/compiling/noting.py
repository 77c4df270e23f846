"""Notes which variants a run launches instead of launching them, with tensors on the meta device. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from strata.kernels.compiling.variant import Variant


@contextmanager
def noting(target: GPUTarget, note: Callable[[Variant], None]) -> Iterator[None]:
    """While the context is open, `note` is told of each variant the first time that it would be launched.

    A tensor on the meta device has its dtype, its strides and, counted from where its memory would begin, its address:
    all that Triton chooses a variant by, as memory of a device begins at multiples of 256 bytes.

    For a process that launches nothing: kernels that have been launched for device 0 are forgotten.
    """
    before, hook = driver._active, knobs.runtime.jit_cache_hook
    met: set[JITFunction] = set()

    def on_missing(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        variant = Variant(compile["specialization_data"])
        kernel.device_caches[0][0][key] = NotLaunched(variant)
        met.add(kernel)
        note(variant)
        return True  # do not compile

    driver.set_active(_NoDriver(target))
    knobs.runtime.jit_cache_hook = on_missing
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = hook
        driver._active = before
        for kernel in met:
            kernel.device_caches.clear()


@dataclass(frozen=True)
class NotLaunched:
    """Stands for a compiled kernel in Triton's memory."""

    variant: Variant
    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


class _NoDriver(DriverBase):  # type: ignore[misc]  # triton is untyped
    """A driver of one device, which is known by its architecture alone."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self._target = target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs here")
