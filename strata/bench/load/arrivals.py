"""When the requests of a load are sent: all at once, as a Poisson process, or in burstier or more regular arrivals."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

MAX_PERCENT = 1000.0
# Requests a second; beyond, all are as good as sent at once.
MAX_RATE = 1e9
# Of either; a request in twelve days. Gaps at lower ones are soon more than a float holds.
MIN_RATE = 1e-6
# Beyond, gaps differ by less than a thousandth.
MAX_BURSTINESS = 1e6
# Of a mean of 1: shapes near 0 draw less, of which nothing can be scaled.
_NO_GAP = 1e-200


@dataclass(frozen=True)
class Rate:
    """value: requests a second (infinite: all at once), or, if `of_saturation`, the share of the server's own rate."""

    value: float
    of_saturation: bool = False

    def per_second(self, saturation: float | None) -> float:
        """Requests a second. saturation: the rate that the server sustains, which a share is of."""
        if not self.of_saturation:
            return self.value
        if saturation is None:
            raise ValueError("a rate in percent needs the measured saturation")
        return self.value * saturation


def parse_rates(text: str) -> list[Rate]:
    """Rates between commas: "4", "inf", or "25%" of saturation."""
    return [_parse_rate(word.strip()) for word in text.split(",")]


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which `count` requests are sent, rising.

    rate: requests a second. burstiness: the shape of the gamma distribution of the gaps between them, whose coefficient
    of variation is burstiness ** -0.5: 1 is a Poisson process, less is burstier, infinite is evenly spaced.

    The gaps are scaled so that the last request is due at count / rate: otherwise the offered rate of 1000 requests
    would be off by some 3 %, which matters near saturation. Of a shape so near 0 that all gaps are too short to
    be scaled there is one gap between two bursts, as in the limit.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    gaps = [1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    if sum(gaps) < _NO_GAP:
        gaps = [0.0] * count
        gaps[rng.randrange(count)] = 1.0
    scale = count / rate / sum(gaps)
    return [scale * sum_of_gaps for sum_of_gaps in accumulate(gaps)]


def load_seeds(seed: int) -> Iterator[int]:
    """The seeds of what is sent one after the other: of the one request that comes first, then of each load."""
    rng = random.Random(seed)
    while True:
        yield rng.getrandbits(64)


def saturation_rate(ends: Sequence[float], concurrency: int) -> float:
    """Requests a second that a server completes while `concurrency` of them are always under way.

    ends: when each request of a closed loop ended, in seconds. The first `concurrency` began together, and while the
    last `concurrency` end no others take their place: both are left out. Requests that are alike also end together, so
    the rate is that of rounds of as many as are under way, on average of all rounds that may begin.
    """
    ordered = sorted(ends)
    rounds = len(ordered) // concurrency - 2
    if rounds <= 0:
        raise ValueError(
            f"saturation at {concurrency} concurrent requests is measured with {3 * concurrency} requests or more, "
            f"of which {len(ordered)} were completed: raise --num-prompts or lower --max-concurrency"
        )
    counted = rounds * concurrency
    begins = ordered[concurrency - 1 : -concurrency - counted]
    seconds = sum(ordered[at + counted] - begin for at, begin in enumerate(begins, concurrency - 1)) / len(begins)
    return counted / seconds


def _parse_rate(word: str) -> Rate:
    of_saturation = word.endswith("%")
    try:
        value = float(word.removesuffix("%"))
    except ValueError:
        value = math.nan
    if of_saturation and MIN_RATE <= value <= MAX_PERCENT:
        return Rate(value / 100, of_saturation=True)
    if of_saturation or not (MIN_RATE <= value <= MAX_RATE or value == math.inf):
        raise ValueError(
            f"--request-rate takes requests a second (4, from {MIN_RATE:g} to {MAX_RATE:,.0f}), inf, or percent of "
            f"saturation (25%, from {MIN_RATE:g}% to {MAX_PERCENT:.0f}%), several between commas; got {word!r}"
        )
    return Rate(value)
