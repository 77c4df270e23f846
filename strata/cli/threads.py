"""How threads of a CPU wait for each other; it has to be said before torch is loaded."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# Of the loop in which GNU's OpenMP looks for work, some 30 us: the next product of a step comes sooner. Its own 300,000
# keep cores busy that others wait for.
_SPINS = "10000"


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait sleep soon, unless the environment says what they do."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
