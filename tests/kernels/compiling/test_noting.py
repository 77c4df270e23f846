"""What would be launched is noted as it would be compiled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from strata.kernels.compiling.noting import noting
from strata.kernels.compiling.variant import Variant
from tests.kernels.compiling.doubled import doubled_kernel

HOPPER = GPUTarget("cuda", 90, 32)
SCALES = (2.0, 3.0)


def noted(*arguments: tuple[Any, Any], **options: Any) -> list[dict[str, Any]]:
    """What is noted of launches of the kernel with these tensors and counts."""
    found: list[Variant] = []
    with noting(HOPPER, found.append):
        for x, count in arguments:
            doubled_kernel[(1,)](x, count, BLOCK=64, SCALES=SCALES, **options)
    return [json.loads(variant.text) for variant in found]


def kind(told: dict[str, Any]) -> tuple[Any, ...]:
    """Types of arguments and which are multiples of 16."""
    multiples = [key[0] for key, value in zip(told["attrs_keys"], told["attrs_vals"], strict=True) if value]
    return (*told["signature"].values(), *multiples)


def memory() -> torch.Tensor:
    """Real memory that begins as a device's does, at a multiple of 256 bytes."""
    plain = torch.zeros(1024)
    skipped = -plain.data_ptr() % 256 // 4
    return plain[skipped : skipped + 512]


@pytest.mark.parametrize("first", [0, 1, 3, 4, 8, 20])
@pytest.mark.parametrize("count", [1, 2, 16, 17, 2**31, 2**35 + 1])
def test_tensors_without_memory_are_told_apart_as_those_with(first: int, count: int) -> None:
    (real,) = noted((memory()[first:], count))
    (meta,) = noted((torch.zeros(512, device="meta")[first:], count))
    assert kind(meta) == kind(real)
    assert meta["key"] == real["key"]


def test_by_hand() -> None:
    x = torch.zeros(512, device="meta")
    assert list(map(kind, noted((x, 16), (x, 32), (x[1:], 1), (x[1:].double(), 7), (x[4:], 2**40)))) == [
        ("*fp32", "i32", "constexpr", "constexpr", 0, 1),
        ("*fp32", "constexpr", "constexpr", "constexpr"),
        ("*fp64", "i32", "constexpr", "constexpr", 0),
        ("*fp32", "i64", "constexpr", "constexpr", 0, 1),
    ]


def test_each_is_noted_once_and_again_in_the_next_context() -> None:
    x = torch.zeros(512, device="meta")
    assert len(noted((x, 16), (x, 48))) == 1
    assert len(noted((x, 16))) == 1


def test_it_is_the_entry_that_a_launch_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found: list[Variant] = []
    with noting(HOPPER, found.append):
        doubled_kernel[(1,)](torch.zeros(512, device="meta"), 7, BLOCK=64, SCALES=SCALES)
    (variant,) = found
    assert variant.name == "tests.kernels.compiling.doubled.doubled_kernel"
    assert variant.compile(HOPPER).hash == _as_launched().hash


def _as_launched() -> Any:
    """What Triton's own ahead-of-time call compiles for the same arguments."""
    from triton.runtime import driver

    from strata.kernels.compiling.noting import _NoDriver

    before = driver._active
    driver.set_active(_NoDriver(HOPPER))
    try:
        return doubled_kernel.warmup(torch.zeros(512, device="meta"), 7, BLOCK=64, SCALES=SCALES, grid=(1,))
    finally:
        driver._active = before
        doubled_kernel.device_caches.clear()
