"""Errors of predictions, against steps whose times are made up."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from benchmarks.predictions.cases import cases
from benchmarks.predictions.errors import ErrorSummary, StepError, step_errors
from strata.cli.main import app
from strata.cost.step_model import StepModel
from strata.hardware.specs import device
from strata.plan.explain.measurement import MeasuredStep, StepChunk
from strata.plan.meta_model import find_config, meta_model


@pytest.fixture(scope="module")
def times() -> StepModel:
    spec = device("h200")
    return StepModel(meta_model(find_config("0.6B"), spec), spec)


def test_cases_hold_each_kind_of_step_and_sixty_at_least() -> None:
    found = list(cases())
    assert len(found) >= 60
    assert len({case.name for case in found}) == len(found)
    assert max(case.longest for case in found) <= 20_000


def test_a_case_is_as_large_as_it_says() -> None:
    mixed = next(case for case in cases() if case.name == "3 decodes, a prompt of 12,000 tokens")
    test = mixed.test()
    assert test.prompt_lengths == (2400, 2400, 2400, 12_000)
    assert mixed.tokens == sum(test.prompt_lengths) + sum(test.outputs)
    assert (mixed.count, mixed.longest) == (4, test.longest)


def test_steps_alike_are_one_error_and_what_compiled_is_none(times: StepModel) -> None:
    chunks = [(StepChunk(0, 100 + step, 1, 1), StepChunk(1, 200 + step, 1, 1)) for step in range(5)]
    begins = [0.0, 0.001, 0.002, 0.0035, 0.0045]
    steps = [
        MeasuredStep(begin, begin + 0.0009, chunk, compiled=int(begin == 0.0))
        for begin, chunk in zip(begins, chunks, strict=True)
    ]
    (found,) = step_errors("two decodes", [steps, steps], times)
    assert (found.kind, found.sequences, found.tokens, found.steps) == ("decode", 2, 2, 8)
    # The second step lasts until the third; behind the third and the last the device waited for something else.
    assert found.measured == pytest.approx(0.5 * (0.001 + 0.0009 + times.around), rel=1e-6)
    assert found.predicted == pytest.approx(times.predict(steps[2].workload).seconds, rel=0.01)


def test_errors_are_shares_of_what_was_measured() -> None:
    assert StepError("", "decode", 1, 1, 1, 1, measured=2.0, predicted=1.5, origin="measured").error == -0.25
    found = ErrorSummary.of([0.01, -0.02, 0.03, -0.04, 0.05, 0.06, 0.07, 0.08, 0.09, -0.5])
    assert (found.count, found.p90) == (10, 0.09)
    assert found.median == pytest.approx(0.055)
    assert found.signed == pytest.approx(0.04)
    with pytest.raises(ValueError, match="nothing was measured"):
        ErrorSummary.of([])


def test_a_name_that_is_no_model_is_told_before_any_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.predictions.command.engine", lambda options: pytest.fail("an engine was started"))
    result = CliRunner().invoke(app, ["bench", "predictions", "--models", "builtin,nowhere", "--device", "cpu"])
    assert isinstance(result.exception, ValueError)
    assert "nowhere" in str(result.exception)
