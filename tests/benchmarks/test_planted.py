"""The planted cases that need a GPU: that their faults are still faults where no GPU runs them."""

from __future__ import annotations

import importlib

from strata.engine.llm import LLM
from strata.engine.recorded_steps import REASONS, RecordedSteps
from strata.engine.sampling_params import SamplingParams

cases = importlib.import_module("benchmarks.planted.cases")


def test_steps_that_launch_eagerly_find_no_recording() -> None:
    recorded = object.__new__(RecordedSteps)
    recorded.unrecorded, recorded.lacking = dict.fromkeys(REASONS, 0), ()
    with cases.no_recorded_steps(None):
        assert recorded.bucket(1, 1, 1, 0, None, decodes=True, scored=False) is None
    assert sum(recorded.unrecorded.values()) == 1  # as if none had been recorded


def test_options_of_faults_and_of_their_mending_are_options_of_engines() -> None:
    for case in cases.CASES:
        for options in (case.options, case.mended):
            given = {"device": "cpu", "max_model_len": 128, "num_pages": 64} | dict(options)
            llm = LLM("builtin", **given)
            assert len(llm.generate("2+2=", SamplingParams(max_tokens=2))) == 1
