"""What comes to a simulated server, and what becomes of it."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from strata.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """due: seconds from the start at which it is sent. prompt: ids; where none are shared, of any value."""

    due: float
    prompt: tuple[int, ...]
    output_tokens: int


@lru_cache(4096)
def blank_prompt(tokens: int) -> tuple[int, ...]:
    """A prompt of which the length alone counts: all of a length are one value in memory."""
    return (0,) * tokens


@lru_cache(4096)
def exactly(output_tokens: int) -> SamplingParams:
    """As a load generator asks for so many tokens."""
    return SamplingParams(max_tokens=output_tokens, ignore_eos=True, temperature=0.6, detokenize=False)


class Intervals:
    """Times between tokens, as many as there are: how many there were of each number of microseconds."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)

    def add(self, seconds: float, count: int = 1) -> None:
        self._counts[int(seconds * 1e6)] += count

    def add_between(self, ends: Sequence[float], count: int) -> None:
        """Of so many sequences, each of which got an id at each of these times."""
        counts = self._counts
        for before, after in pairwise(ends):
            counts[int((after - before) * 1e6)] += count

    def counted(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Seconds, rising, and how many intervals took as long."""
        kinds = sorted(self._counts)
        counts = np.array([self._counts[kind] for kind in kinds], dtype=np.int64)
        return 1e-6 * (np.array(kinds, dtype=np.float64) + 0.5), counts


class Outcomes:
    """What became of each request, by its number; times are seconds from the start, NaN where nothing came.

    due, sent: when it was to be sent, and was. first, last: when its first and last text came to the client. prompt,
    output: tokens. faults: why a request failed, by its number; None of it counts then.
    """

    def __init__(self, requests: Sequence[SimulatedRequest]) -> None:
        count = len(requests)
        nothing = array("d", [float("nan")]) * count
        self.due = array("d", (request.due for request in requests))
        self.sent, self.first, self.last = array("d", nothing), array("d", nothing), array("d", nothing)
        self.prompt = array("i", (len(request.prompt) for request in requests))
        self.output = array("i", (request.output_tokens for request in requests))
        self.faults: dict[int, str] = {}
        self.intervals = Intervals()

    def completed(self) -> NDArray[np.int64]:
        """The numbers of the requests that got all of their tokens."""
        return np.array([n for n in range(len(self.due)) if n not in self.faults], dtype=np.int64)


def check_order(requests: Iterable[SimulatedRequest]) -> None:
    """Raises ValueError unless requests come in order, each with a prompt and an answer."""
    before = 0.0
    for number, request in enumerate(requests):
        if not before <= request.due < float("inf"):
            raise ValueError(f"request {number} is due at {request.due:g} s, the one before at {before:g} s: sort them")
        if not request.prompt or request.output_tokens < 1:
            raise ValueError(f"request {number} needs a prompt and an answer of at least one token")
        before = request.due
