"""What the sections of a run's config have in common: values that must be one of some, or positive."""

from __future__ import annotations

import math
from collections.abc import Sequence


def one_of(section: str, config: object, **accepted: Sequence[str]) -> None:
    """Raise ValueError for a field that has none of its accepted values."""
    for name, choices in accepted.items():
        if getattr(config, name) not in choices:
            raise ValueError(f"{section}.{name} = {getattr(config, name)!r} must be one of {', '.join(choices)}")


def positive(section: str, config: object, *names: str) -> None:
    """Raise ValueError for a field that is not positive and finite."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{section}.{name} = {getattr(config, name)} must be positive and finite")
