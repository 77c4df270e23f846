"""Every test of the kernels draws the same random numbers each time it runs.

Files called `interpreted` are run by `test_interpreted`, a process each, because Triton's interpreter is chosen before
Triton is loaded: there kernels run on a CPU, as on a GPU that launches nothing early, and memory that is only allocated
holds NaN.
"""

from __future__ import annotations

import os

import pytest
import torch

from strata.kernels.device_limits import SHARED_BYTES, DeviceLimits

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETED:
    from tests.kernels.interpreter import prepare_interpreter

    prepare_interpreter()
    torch.set_deterministic_debug_mode("warn")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)


@pytest.fixture(autouse=IS_INTERPRETED)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    ampere = DeviceLimits("any", (8, 0), SHARED_BYTES, 108)
    monkeypatch.setattr(DeviceLimits, "of", staticmethod(lambda device: ampere))
