"""Derives variants in a process of its own, as a start does."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import pytest

from strata.engine.ahead import derive
from strata.engine.ahead.derive import as_if_launched, note_variants
from strata.engine.engine_config import EngineConfig
from strata.engine.request import Request
from strata.engine.sampling_params import SamplingParams
from strata.hardware.specs import device
from strata.kernels.compiling.noting import Variant
from strata.kernels.device_limits import DeviceLimits

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 50}, {"top_p": 0.9, "min_p": 0.02}, {"logprobs": 3},
    {"logprobs": 0, "top_k": 5}, {"repetition_penalty": 1.2}, {"seed": 7, "presence_penalty": 0.5, "top_p": 0.5},
    {"prompt_logprobs": 2}, {"logit_bias": {3: 1.0}, "min_tokens": 3},
]  # fmt: skip


def hopper() -> DeviceLimits:
    return DeviceLimits.listed(device("h200"))


def derived(model: str, options: dict[str, Any], whole: bool = False) -> list[str]:
    """The variants, as JSON. whole: from all layers of the model."""
    found: list[Variant] = []
    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr(derive, "shortened", lambda config: config)
        note_variants(EngineConfig.from_options(model, options), hopper(), found.append)
    return [variant.text for variant in found]


def noted_before(module: str, model: str, options: dict[str, Any]) -> list[tuple[str, bool]]:
    """Of each variant in turn the kernel, and whether it was noted before the module was imported."""
    found: list[tuple[str, bool]] = []
    asked = EngineConfig.from_options(model, options)
    note_variants(asked, hopper(), lambda variant: found.append((variant.kernel, module not in sys.modules)))
    return found


def served_beyond(model: str, options: dict[str, Any], longest: int) -> list[str]:
    """Which variants 150 requests of all kinds launch that were not derived."""
    ready: list[Variant] = []
    engine = note_variants(EngineConfig.from_options(model, options), hopper(), ready.append)
    met: list[Variant] = []
    with as_if_launched(hopper(), met.append):
        rng = random.Random(1)
        for number in range(150):
            length = rng.choice([1, 7, 40, 200, rng.randint(1, longest)])
            params = SamplingParams(ignore_eos=True, max_tokens=rng.randint(3, 30), **rng.choice(WAYS))
            prompt = tuple(rng.randint(0, 300) for _ in range(length))
            engine.loop.add(Request(str(number), prompt, params))
            if rng.random() < 0.5:
                engine.loop.step()
        for _ in engine.loop.outputs():
            pass
    known = {variant.text for variant in ready}
    assert len(met) > 5
    return [json.dumps(variant.text) for variant in met if variant.text not in known]
