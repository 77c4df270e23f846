"""Which specializations of a kernel run, and what they may take: tests compile them for a GPU that is not there."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits, meta_means


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


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What `cases_of` launches with in the place of a tensor."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cases_of(
    name: str, run: Callable[..., object], *args: Any, must: tuple[str, ...] = (), **more: Any
) -> list[CompileCase]:
    """A case of each kernel that `run(*args, **more)` launches on an H200 for tensors on the meta device. must: what
    the PTX of each contains. Needs Triton, and no device."""
    from triton.backends.compiler import GPUTarget

    from strata.kernels.compiling.noting import noting
    from strata.kernels.compiling.variant import Variant

    noted: list[Variant] = []
    hopper = DeviceLimits("NVIDIA H200", (9, 0), SHARED_BYTES, 132)
    with meta_means(hopper), noting(GPUTarget("cuda", 90, 32), noted.append):
        run(*args, **more)
    return [_case(name, json.loads(variant.text), must) for variant in noted]


def _case(name: str, told: dict[str, Any], must: tuple[str, ...]) -> CompileCase:
    module, _, kernel_name = told["name"].rpartition(".")
    kernel = getattr(importlib.import_module(module), kernel_name)
    names = kernel.arg_names
    constants = {names[key[0]]: value for key, value in zip(told["constant_keys"], told["constant_vals"], strict=True)}
    by_16 = {names[key[0]] for key, value in zip(told["attrs_keys"], told["attrs_vals"], strict=True) if value}
    signature = {one: kind + ":16" * (one in by_16) for one, kind in told["signature"].items() if kind != "constexpr"}
    options = told["options"]
    return CompileCase(
        f"{kernel_name} {name}",
        kernel,
        signature,
        constants,
        options["num_warps"],
        options["num_stages"],
        must,
        options["maxnreg"],
    )
