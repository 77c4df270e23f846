"""The largest of errors that were measured: NaN if one is, which `max` passes over and a bound then does not see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def largest(errors: Iterable[float]) -> float:
    found = [*errors]
    return math.nan if any(map(math.isnan, found)) else max(found)


def name_of_largest(errors: Mapping[str, float]) -> str:
    return max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
