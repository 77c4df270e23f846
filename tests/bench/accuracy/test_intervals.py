"""Intervals against published tables, hand counts, and what theory says of resampled means."""

from __future__ import annotations

import numpy as np
import pytest

from strata.bench.accuracy.intervals import Bootstrap, mean_difference, mean_of_tasks, wilson


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_in_newcombes_table(right: int, asked: int, low: float, high: float) -> None:
    """R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3."""
    found = wilson(right / asked, asked)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_tasks_count_alike_and_their_mean_has_a_width_where_all_are_right() -> None:
    small, large = np.array([1.0, 0.0]), np.ones(8)
    assert mean_of_tasks([small, large]).value == 0.75
    alike = mean_of_tasks([np.ones(50), np.ones(50)])
    assert (alike.value, alike.low) == (1.0, wilson(1.0, 100).low)


def test_a_difference_of_pairs_by_hand() -> None:
    """Of 100 questions 8 are right for the model alone, 2 for the reference: (8 + 1) / 102 and (2 + 1) / 102."""
    right, reference = np.zeros(100), np.zeros(100)
    right[:8], reference[8:10], right[50:], reference[50:] = 1, 1, 1, 1
    found = mean_difference([right], [reference])
    assert found.value == pytest.approx(0.06)
    assert (found.low, found.high) == (pytest.approx(0.0588 - 0.0656, abs=2e-4), pytest.approx(0.1244, abs=2e-4))
    same = mean_difference([right], [right])
    assert same.low is not None
    assert same.low < same.value == 0 < same.high  # type: ignore[operator]


def test_resampled_means_vary_as_documents_do() -> None:
    """400 documents of 5 tokens that are alike: as 400 figures, not 2,000."""
    of_documents = np.random.default_rng(3).normal(2.0, 1.0, 400)
    bootstrap = Bootstrap([document for document in range(400) for _ in range(5)])
    found = bootstrap.mean(np.repeat(of_documents, 5))
    assert found.value == pytest.approx(of_documents.mean())
    assert found.low is not None
    assert found.high is not None
    assert found.high - found.low == pytest.approx(2 * 1.96 * of_documents.std() / 20, rel=0.1)
    shown = bootstrap.mean(np.repeat(of_documents, 5), np.exp)
    assert (shown.value, shown.low) == (pytest.approx(np.exp(found.value)), pytest.approx(np.exp(found.low)))


def test_quantiles_and_one_document() -> None:
    values = np.random.default_rng(0).permutation(np.arange(1.0, 1001.0))
    found = Bootstrap(range(1000)).quantile(values, 0.99)
    assert found.value == 990
    assert found.low is not None
    assert found.high is not None
    # The 990th of 1000 lies between the orders 990 -+ 1.96 sqrt(1000 * 0.99 * 0.01).
    assert (found.low, found.high) == (pytest.approx(983.8, abs=2.5), pytest.approx(996.2, abs=2.5))
    assert Bootstrap([7] * 1000).quantile(values, 0.99).low is None
