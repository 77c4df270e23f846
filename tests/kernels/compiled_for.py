"""Compiling Triton kernels for a GPU that is not there: what a kernel needs, and which instructions it became."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from strata.kernels.compile_case import CompileCase


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
    usage = _resource_usage(compiled.asm["cubin"])
    return Resources(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared, compiled.asm["ptx"])


def _resource_usage(cubin: bytes) -> dict[str, int]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
