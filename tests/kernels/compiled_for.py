"""Compiling Triton kernels for a GPU that is not there: what a kernel needs, and which instructions it became."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from strata.kernels.linear.small_m import Launch

_POINTERS = {torch.bfloat16: "*bf16:16", torch.float32: "*fp32:16", torch.int32: "*i32:16"}


@dataclass(frozen=True)
class CompileCase:
    """One specialization of a Triton kernel.

    signature: for each argument that is not a constant its type as Triton writes it ("*bf16", "i32"), followed by ":16"
        if the pointer or number is a multiple of 16.
    must_contain: what the PTX has to contain.
    max_registers: what the launch caps the registers of a thread at (`maxnreg`), None: nothing.
    spilled_bytes: the most that a thread may spill, more than 0 only for a cap that is worth it.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int
    must_contain: tuple[str, ...] = ()
    max_registers: int | None = None
    spilled_bytes: int = 0


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers and spilled bytes of a thread, bytes of shared memory; and its PTX."""

    registers: int
    spills: int
    shared_bytes: int
    ptx: str


def compile_for(case: CompileCase, capability: int = 90) -> Resources:
    """Compile for a CUDA device of this compute capability (90 is Hopper). Needs Triton, and no device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from strata.kernels.compiling.launched import resource_usage

    signature, attributes = {}, {}
    for index, name in enumerate(case.kernel.arg_names):
        kind, _, divisor = case.signature.get(name, "constexpr").partition(":")
        signature[name] = kind
        if divisor:
            attributes[(index,)] = [["tt.divisibility", int(divisor)]]
    compiled = triton.compile(
        ASTSource(case.kernel, signature, dict(case.constants), attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, "maxnreg": case.max_registers},
    )
    usage = resource_usage(compiled.asm["cubin"])
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared, compiled.asm["ptx"])


def case_of(planned: Launch) -> CompileCase:
    """The specialization that a launch of a product with few rows would compile; its tensors may be on any device."""
    signature: dict[str, str] = {}
    constants: dict[str, object] = {name: value for name, value in planned.options.items() if name.isupper()}
    for name, value in zip(planned.kernel.arg_names, planned.args, strict=False):
        if value is None:
            constants[name] = None
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if name == "rows" or value % 16 else "i32:16"
    return CompileCase(str(planned.options), planned.kernel, signature, constants, planned.options["num_warps"], 2)
