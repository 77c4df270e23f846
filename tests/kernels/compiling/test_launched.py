"""What a call launches, told on the meta device, and what its kernels take of a GPU that is not there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import JITFunction, knobs

from strata.hardware.figures import Cuda
from strata.hardware.specs import device
from strata.kernels.compiling.launched import launched, launched_elsewhere
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.norm.norm import add_rms_norm
from tests.kernels.compiling.doubled import compile_doubled, doubled_kernel

H200 = device("h200")
CUDA = H200.cuda or Cuda((9, 0), 0, 0)
LIMITS = DeviceLimits.listed(H200)


def test_launches_are_counted_in_order() -> None:
    x = torch.zeros(512, device="meta")
    run, hooks = JITFunction.run, list(knobs.runtime.launch_enter_hook.calls)

    def call() -> None:
        for grid in ((264, 2), (7,), lambda bound: (bound["BLOCK"], 1, 3)):
            doubled_kernel[grid](x, 16, BLOCK=64, SCALES=(2.0, 3.0), num_warps=8)

    found = launched_elsewhere(call, LIMITS, CUDA)
    assert (JITFunction.run, list(knobs.runtime.launch_enter_hook.calls)) == (run, hooks)
    assert [(one.name, one.warps, one.blocks) for one in found] == [
        ("doubled_kernel", 8, 528), ("doubled_kernel", 8, 7), ("doubled_kernel", 8, 192)
    ]  # fmt: skip
    # Few registers, no shared memory: 2,048 threads are 8 blocks of 256, 1,056 on 132 multiprocessors.
    assert {one.shared_bytes for one in found} == {0}
    assert {(one.occupancy.resident, one.occupancy.warps) for one in found} == {(8, 1.0)}
    assert [one.occupancy.waves for one in found] == [0.5, 7 / 1056, 192 / 1056]


def test_an_operation_by_hand() -> None:
    """A program a row: as many blocks as rows, whose registers are those that the compiler tells of the same kernel."""
    x, weight = (
        torch.empty(1000, 4096, dtype=torch.bfloat16, device="meta"),
        torch.empty(4096, device="meta").bfloat16(),
    )
    (found,) = launched_elsewhere(lambda: add_rms_norm(x, x, weight, 1e-6), LIMITS, CUDA)
    assert found.blocks == 1000
    held = min(2048 // (32 * found.warps), 65536 // (-(-found.registers // 8) * 8 * 32) // 4 * 4 // found.warps)
    assert found.occupancy.resident == held
    assert found.occupancy.waves == 1000 / (132 * held)


def test_what_is_compiled_already_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where launches return what was compiled; registers are those that its assembly names."""
    compiled, _ = compile_doubled()

    def run(self: JITFunction, *_: object, grid: Any, **options: object) -> Any:
        if callable(grid):  # as Triton does, which then launches
            grid({})
        return compiled

    monkeypatch.setattr(JITFunction, "run", run)
    x = torch.zeros(512, device="meta")
    (found,) = launched(lambda: doubled_kernel[(3,)](x, 16, BLOCK=64, SCALES=(2.0, 3.0)), CUDA)
    assert (found.name, found.blocks, found.warps) == ("doubled_kernel", 3, 4)
    used = {int(number) for number in re.findall(r"\bR(\d+)\b", compiled.asm["sass"])}
    assert max(used) < found.registers <= max(used) + 8
