"""The planted cases that need a GPU: that their faults are still faults where no GPU runs them."""

from __future__ import annotations

import importlib

from strata.cache.tables import BufferShape
from strata.engine.llm import LLM
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes
from strata.engine.sampling_params import SamplingParams

cases = importlib.import_module("benchmarks.planted.cases")


def test_steps_that_launch_eagerly_find_no_recording() -> None:
    sizes, decode = StepSizes([BufferShape(1, 1, 1)]), StepShape(1, 1, 1, decodes=True)
    assert sizes.holding(decode) == BufferShape(1, 1, 1)
    with cases.no_recorded_steps(None):
        assert sizes.holding(decode) is None


def test_options_of_faults_and_of_their_mending_are_options_of_engines() -> None:
    for case in cases.CASES:
        for options in (case.options, case.mended):
            given = {"device": "cpu", "max_model_len": 128, "num_pages": 64} | dict(options)
            llm = LLM("builtin", **given)
            assert len(llm.generate("2+2=", SamplingParams(max_tokens=2))) == 1
