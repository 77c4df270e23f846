"""Keeps numbers off the bounds that a JSON schema excludes, where llguidance 1.9.1 lets them in.

Its pattern for `{"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}` takes 0, and likewise wherever an excluded
bound is a whole number and the other bound is less than 1 away. Such a bound is moved inwards and included.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from strata.engine.grammars.schema_parts import with_schemas_changed

# Share of the distance between two bounds that is lost at an excluded one.
_LOST = 1e-6

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def with_inner_bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema, with the excluded bounds moved that would not hold; anything else is as it was."""
    return with_schemas_changed(_moved(schema), with_inner_bounds)


def _moved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    bounds = {key: schema[key] for key in _BOUNDS if _is_number(schema.get(key))}
    low = max((bounds[key] for key in ("minimum", "exclusiveMinimum") if key in bounds), default=-math.inf)
    high = min((bounds[key] for key in ("maximum", "exclusiveMaximum") if key in bounds), default=math.inf)
    if not 0 < high - low < 1:
        return schema
    moved = dict(schema)
    for excluded, included, bound, inwards in (
        ("exclusiveMinimum", "minimum", low, 1),
        ("exclusiveMaximum", "maximum", high, -1),
    ):
        if bounds.get(excluded) == bound and bound == int(bound):
            del moved[excluded]
            moved[included] = bound + inwards * _LOST * (high - low)
    return moved


def _is_number(value: Any) -> bool:
    """One that a float can hold; of others there is nothing to mend."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
