"""A variant of a kernel, as text that another process can compile: Triton's own description of a specialization."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from typing import Any

from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.compiler import compile as compile_source


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
