"""Notes which variants a run launches instead of launching them, with tensors on the meta device. Needs no GPU.

`Variant`: one of a kernel, as text that another process can compile: Triton's own description of a specialization.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton import JITFunction, knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_source
from triton.runtime import driver


@dataclass(frozen=True)
class Variant:
    """One specialization of a kernel.

    text: JSON of the kernel's name, the types of its arguments, which of them are constants or multiples of 16, the
    options of its compilation, and the key under which Triton holds it in memory.
    """

    text: str

    @property
    def name(self) -> str:
        """Of the kernel, with the module before it."""
        return str(json.loads(self.text)["name"])

    @property
    def kernel(self) -> str:
        """The kernel's own name."""
        return self.name.rpartition(".")[2]

    @property
    def signature(self) -> str:
        """The types of all arguments: variants that share them are launched by the same code."""
        return json.dumps(list(json.loads(self.text)["signature"].values()))

    def compile(self, target: GPUTarget) -> CompiledKernel:
        """Compile it into Triton's cache on the disk, or find it there. Needs no device.

        Raises whatever the compiler does.
        """
        told = json.loads(self.text)
        return compile_source(_source(told), target=target, options=_as_tuples(told["options"]))

    def hold(self) -> None:
        """Have it ready on the current device: a launch with such arguments will neither compile nor read it."""
        told = json.loads(self.text)
        source = _source(told)
        kernel, device = source.fn, _current_device()
        kernels, _, _, backend, _ = kernel.device_caches[device]
        if told["key"] not in kernels:
            options = backend.parse_options(_as_tuples(told["options"]))
            given = (source.signature, device, source.constants, options, source.attrs)
            kernel._do_compile(told["key"], *given, warmup=True)
        held = kernels.get(told["key"])
        if held is not None:
            held.run  # noqa: B018  # reading it brings the kernel to the device


def _source(told: dict[str, Any]) -> ASTSource:
    module, _, name = told["name"].rpartition(".")
    kernel = getattr(importlib.import_module(module), name)
    assert isinstance(kernel, JITFunction)
    constants = zip(map(tuple, told["constant_keys"]), map(_as_tuples, told["constant_vals"]), strict=True)
    attributes = zip(map(tuple, told["attrs_keys"]), told["attrs_vals"], strict=True)
    return ASTSource(kernel, told["signature"], dict(constants), dict(attributes))


def _as_tuples(value: Any) -> Any:
    """What JSON has made lists of: Triton's are tuples everywhere but in attributes, and names the variant by them."""
    if isinstance(value, dict):
        return {name: _as_tuples(one) for name, one in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _current_device() -> int:
    from triton.runtime import driver

    return int(driver.active.get_current_device())


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
