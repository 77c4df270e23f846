"""Where cuDNN cannot attend for prompts, the engine says why in a line and goes on without it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from strata.cache.pool import KVPool, PoolShape
from strata.engine.engine_config import library_limit
from strata.engine.startup.library import has_library_plan, library_scales, without_library
from strata.kernels.attention.cudnn_plan import PlanShape
from strata.kernels.device_limits import DeviceLimits
from strata.models.config import config_from_dict
from strata.models.families import build
from strata.models.layers import Attention
from strata.models.shapes import SHAPES

HOPPER = DeviceLimits("NVIDIA H200", (9, 0), 227 * 1024, 132)
CONFIG = config_from_dict(SHAPES["0.6B"], "0.6B")


@pytest.mark.parametrize(
    ("changed", "dtype", "page_size", "limits", "why"),
    [
        ({}, torch.bfloat16, 16, HOPPER, None),
        ({}, torch.float16, 64, HOPPER, None),
        ({"windows": (None, 512) * 14}, torch.bfloat16, 16, HOPPER, None),
        ({"windows": (512,) * 28}, torch.bfloat16, 16, HOPPER, "all layers have windows"),
        ({"head_dim": 80}, torch.bfloat16, 16, HOPPER, "heads have 80 elements, not 64 or 128"),
        ({}, torch.float32, 16, HOPPER, "it takes no float32"),
        ({}, torch.bfloat16, 8, HOPPER, "pages have 8 tokens, fewer than 16"),
        ({}, torch.bfloat16, 16, replace(HOPPER, product="A100", capability=(8, 0)), "A100 is no Hopper"),
    ],
)
def test_what_it_does_not_take_has_a_reason(
    changed: dict, dtype: torch.dtype, page_size: int, limits: DeviceLimits, why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert library_limit(limits, replace(CONFIG, **changed), dtype, page_size) == why


def test_a_front_end_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    why = library_limit(HOPPER, CONFIG, torch.bfloat16, 16)
    assert why == "nvidia-cudnn-frontend is not installed"
    assert "without cuDNN: nvidia-cudnn-frontend is not installed" in without_library(why)


def test_a_plan_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("cudnn")
    old.backend_version = lambda: 90500  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn", old)
    pool = KVPool(PoolShape(1, 16, 8, 128, torch.bfloat16), 2, torch.device("cpu"))
    told: list[str] = []
    assert not has_library_plan(CONFIG, {0.1}, pool, 4096, True, told.append)
    assert len(told) == 1
    assert "90500" in told[0]
    assert "\n" not in told[0]


def test_nothing_is_imported_before_a_plan_is_made() -> None:
    program = "import sys, strata.engine.build, strata.plan.meta_model; sys.exit('cudnn' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_front_end_that_has_no_origin_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some put an empty module in its place."""
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    assert library_limit(HOPPER, CONFIG, torch.bfloat16, 16) == "nvidia-cudnn-frontend is not installed"


def test_plans_are_made_for_the_scales_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers without a window; those of others attend otherwise."""
    with torch.device("meta"):
        model = build(replace(CONFIG, num_layers=3, windows=(None, 512, None)), 4096)
    for module in model.modules():
        if isinstance(module, Attention):
            module.spec = module.spec._replace(scale=0.25 * (1 + module.spec.layer))
    scales = library_scales(model)
    assert scales == {0.25, 0.75}
    made: list[tuple[float, int, int, int]] = []

    def plan(shape: PlanShape, _: torch.device) -> None:
        made.append((shape.scale, shape.key_row, shape.value_row, shape.longest))
        if len(made) == 4:
            raise RuntimeError("no such plan\nin detail")

    monkeypatch.setattr("strata.engine.startup.library.plan_for", plan)
    pool = KVPool(PoolShape(1, 16, 8, 128, torch.bfloat16), 2, torch.device("cpu"))
    told: list[str] = []
    assert not has_library_plan(CONFIG, scales, pool, 4096, True, told.append)
    fresh, gathered = (24 * 128, 24 * 128 + 8 * 128, 8192), (8 * 128, 8 * 128, 4096)
    assert made == [(0.25, *fresh), (0.25, *gathered), (0.75, *fresh), (0.75, *gathered)]
    made.clear()
    assert has_library_plan(CONFIG, scales, pool, 4096, False, told.append)
    assert made == [(0.25, *gathered), (0.75, *gathered)]
    assert told == ["steps attend for prompts without cuDNN: no such plan"]
