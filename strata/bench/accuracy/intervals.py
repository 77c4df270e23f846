"""Intervals in which a figure lies with 95 % confidence: by resampling documents, and Wilson's of counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

RESAMPLES = 1000
_LOW, _HIGH = 2.5, 97.5  # percentiles
_Z = 1.959964  # of the normal distribution, 97.5 %


@dataclass(frozen=True)
class IntervalEstimate:
    """low, high: of its interval of 95 %; None where there is one document alone, which says nothing of others."""

    value: float
    low: float | None
    high: float | None


def wilson(share: float, asked: float) -> IntervalEstimate:
    """A share of so many, with Wilson's score interval (E. B. Wilson, JASA 22, 1927), which stays within 0 and 1 and
    has a width where all are right."""
    spread = _Z * _Z / asked
    middle = (share + spread / 2) / (1 + spread)
    half = _Z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked)) / (1 + spread)
    return IntervalEstimate(share, max(0.0, middle - half), min(1.0, middle + half))


def mean_of_tasks(right: Sequence[Values]) -> IntervalEstimate:
    """Of what was right, 1 or 0 for each question of each task, the mean over tasks, which count alike: Wilson's
    interval of as many questions as would vary so much were they of one task, which is no narrower than theirs."""
    return wilson(_mean(right), _asked(right))


def mean_difference(right: Sequence[Values], reference: Sequence[Values]) -> IntervalEstimate:
    """Of two means over tasks, of the same questions: by those that one alone has right, with the adjusted Wald
    interval of D. G. Bonett and R. M. Price (J. Educ. Behav. Stat. 37, 2012), which has a width where there are none.
    """
    asked = _asked(right)
    better = (_mean([np.maximum(a - b, 0) for a, b in zip(right, reference, strict=True)]) * asked + 1) / (asked + 2)
    worse = (_mean([np.maximum(b - a, 0) for a, b in zip(right, reference, strict=True)]) * asked + 1) / (asked + 2)
    half = _Z * math.sqrt((better + worse - (better - worse) ** 2) / (asked + 2))
    return IntervalEstimate(_mean(right) - _mean(reference), better - worse - half, better - worse + half)


def _mean(of_tasks: Sequence[Values]) -> float:
    return float(np.mean([values.mean() for values in of_tasks]))


def _asked(of_tasks: Sequence[Values]) -> float:
    return len(of_tasks) ** 2 / sum(1 / len(values) for values in of_tasks)


class Bootstrap:
    """Percentile bootstrap over documents (B. Efron, Ann. Statist. 7, 1979): tokens of one depend on each other, so
    whole documents are drawn again, with replacement.

    documents: [tokens], the number of the document of each. All figures of one are of the same draws.
    """

    def __init__(self, documents: Sequence[int], seed: int = 0) -> None:
        names, self._places = np.unique(np.array(documents), return_inverse=True)
        self.count = len(names)
        drawn = np.random.default_rng(seed).multinomial(self.count, np.full(self.count, 1 / self.count), RESAMPLES)
        self._drawn = drawn.astype(np.float64)  # [resamples, documents]: how often

    def mean(self, values: Values, of: Callable[[Values], Values] = lambda mean: mean) -> IntervalEstimate:
        """Of all tokens, each counting alike; of: what is told of the mean."""
        sums = np.bincount(self._places, values, self.count)
        counts = np.bincount(self._places, minlength=self.count)
        whole = of(np.array([sums.sum() / counts.sum()]))
        return self._estimate(float(whole[0]), of((self._drawn @ sums) / (self._drawn @ counts)))

    def quantile(self, values: Values, share: float) -> IntervalEstimate:
        """The least value that `share` of all tokens do not exceed."""
        order = np.argsort(values)
        ordered, places = values[order], self._places[order]

        def of(weights: Values) -> float:
            reached = np.cumsum(weights[places])
            return float(ordered[np.searchsorted(reached, share * reached[-1] * (1 - 1e-12))])

        return self._estimate(of(np.ones(self.count)), np.array([of(weights) for weights in self._drawn]))

    def _estimate(self, value: float, drawn: Values) -> IntervalEstimate:
        if self.count < 2:
            return IntervalEstimate(value, None, None)
        low, high = np.percentile(drawn, (_LOW, _HIGH))
        return IntervalEstimate(value, float(low), float(high))
