"""Times by a start and a rate."""

from __future__ import annotations

import pytest

from strata.hardware.prediction import FittedTimes, Prediction


def test_a_line_is_found_and_says_how_sure_it_is() -> None:
    fitted = FittedTimes.of((work, 3e-6 + 2e-9 * work) for work in (1e3, 1e4, 1e5))
    assert fitted is not None
    assert (fitted.start, fitted.each) == (pytest.approx(3e-6), pytest.approx(2e-9))
    assert fitted.predict(5e4) == Prediction(pytest.approx(103e-6), "interpolated")
    assert fitted.predict(1e6) == Prediction(pytest.approx(2.003e-3), "analytic")
    assert fitted.predict(1).origin == "analytic"


def test_errors_count_by_their_share_of_the_time() -> None:
    """A small call is as important as one a thousand times as long."""
    fitted = FittedTimes.of([(1e3, 10e-6), (1e3, 12e-6), (1e6, 2e-3)])
    assert fitted is not None
    assert 10e-6 < fitted.predict(1e3).seconds < 12e-6


def test_no_call_takes_less_than_no_time() -> None:
    fitted = FittedTimes.of([(1.0, 1.0), (2.0, 4.0)])
    assert fitted is not None
    assert fitted.start == 0
    # Relative errors of each * 1 against 1, and of each * 2 against 4, are least at 1.2.
    assert fitted.each == pytest.approx(1.2)


def test_calls_of_one_size_tell_no_rate() -> None:
    assert FittedTimes.of([(1.0, 1.0), (1.0, 2.0)]) is None
    assert FittedTimes.of([]) is None
