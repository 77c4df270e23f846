"""The runs for compute-sanitizer reach every own kernel; checked without a GPU, where launches do nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton import JITFunction

from benchmarks import sanitize
from strata.kernels.moe import local_order


@pytest.fixture
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: None)
    monkeypatch.setattr(local_order, "implementations_for", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    shared = {"shared_memory_per_block_optin": 227 << 10}
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0, **shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)


@pytest.mark.usefixtures("_no_device")
def test_every_own_kernel_is_launched() -> None:
    with sanitize.launches() as launched:
        for _, run in sanitize.calls():
            run()
    assert sanitize.missing(launched) == set()


@pytest.mark.usefixtures("_no_device")
def test_a_kernel_that_nothing_launches_is_named() -> None:
    with sanitize.launches() as launched:
        for name, run in sanitize.calls():
            if "rope" not in name:
                run()
    left = sanitize.missing(launched)
    assert {
        "rope_kernel",
        "rope_angles_kernel",
        "qk_rope_kv_write_kernel",
        "rotate_heads_kernel",
    } == left


@pytest.mark.usefixtures("_no_device")
def test_launches_are_noted_only_while_it_is_asked_for() -> None:
    before = JITFunction.run
    with pytest.raises(KeyError), sanitize.launches():
        raise KeyError
    assert JITFunction.run is before


def test_without_a_gpu_it_says_so() -> None:
    root = Path(sanitize.__file__).parent.parent
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, sanitize.__file__], env=hidden, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Hopper" in done.stderr
    assert "Traceback" not in done.stderr
