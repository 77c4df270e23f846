"""Which specializations of a kernel run, and what they may take: tests compile them for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


def by_type(names: Mapping[str, str]) -> dict[str, str]:
    """A signature, from the names of all arguments of each type, separated by spaces."""
    return {name: kind for kind, some in names.items() for name in some.split()}
