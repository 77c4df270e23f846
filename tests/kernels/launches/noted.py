"""Compile cases that follow from launches: what a call would launch on an H200, with tensors on the meta device."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.device_limits import DeviceLimits, meta_means
from tests.kernels.compiled_for import CompileCase

H200 = DeviceLimits("NVIDIA H200", (9, 0), 232448, 132)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def noted(
    name: str, launch: Callable[[], object], must: Mapping[Any, tuple[str, ...]] | None = None, spilled: int = 0
) -> list[CompileCase]:
    """A case for each kernel that the call launches. must: instructions that a kernel has to contain. spilled: the most
    bytes that a kernel may spill."""
    from triton.backends.compiler import GPUTarget

    from strata.kernels.compiling.noting import Variant, noting

    variants: list[Variant] = []
    with noting(GPUTarget("cuda", 90, 32), variants.append), meta_means(H200), torch.inference_mode():
        launch()
    cases = [_case(name, json.loads(one.text), must or {}, spilled) for one in variants]
    # A call may launch a kernel several times, with other strides.
    return [
        replace(case, name=f"{case.name}, {at}") if case.name in {one.name for one in cases[:at]} else case
        for at, case in enumerate(cases)
    ]


def _case(name: str, told: dict[str, Any], must: Mapping[Any, tuple[str, ...]], spilled: int) -> CompileCase:
    module, _, own = told["name"].rpartition(".")
    kernel = getattr(importlib.import_module(module), own)
    divisors = {key[0]: ":16" for key, value in zip(told["attrs_keys"], told["attrs_vals"], strict=True) if value}
    kinds = enumerate(told["signature"].items())
    signature = {arg: kind + divisors.get(at, "") for at, (arg, kind) in kinds if kind != "constexpr"}
    values = zip(told["constant_keys"], told["constant_vals"], strict=True)
    constants = {kernel.arg_names[key[0]]: value for key, value in values}
    options = told["options"]
    return CompileCase(
        f"{own.removesuffix('_kernel')} {name}",
        kernel,
        signature,
        constants,
        options["num_warps"],
        options["num_stages"],
        must.get(kernel, ()),
        options["maxnreg"],
        spilled,
    )
