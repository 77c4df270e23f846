"""Which weights are to become zeros, checked before any of them is read."""

from __future__ import annotations

from dataclasses import dataclass

TWO_OF_FOUR, UNSTRUCTURED = "2:4", "unstructured"
PATTERNS = (TWO_OF_FOUR, UNSTRUCTURED)
MAGNITUDE, WANDA, SPARSEGPT = "magnitude", "wanda", "sparsegpt"
METHODS = (SPARSEGPT, WANDA, MAGNITUDE)
_TWO_OF_FOUR_SHARE = 0.5


@dataclass(frozen=True)
class Pruning:
    """pattern: of `PATTERNS`. share: of each matrix's weights that become 0. method: of `METHODS`."""

    pattern: str
    share: float
    method: str

    @staticmethod
    def of(pattern: str, share: float, method: str) -> Pruning:
        """Raises ValueError for what is not known, and for another share than 2:4 has."""
        if pattern not in PATTERNS:
            raise ValueError(f"pattern = {pattern!r} is not known; accepted are {', '.join(map(repr, PATTERNS))}")
        if method not in METHODS:
            raise ValueError(f"method = {method!r} is not known; accepted are {', '.join(map(repr, METHODS))}")
        if not 0 < share < 1:
            raise ValueError(f"share = {share} must be a part of all weights, more than 0 and less than 1")
        if pattern == TWO_OF_FOUR and share != _TWO_OF_FOUR_SHARE:
            raise ValueError(
                f"share = {share}: 2:4 makes half of the weights zeros; leave it out, or prune unstructured"
            )
        return Pruning(pattern, share, method)

    @property
    def needs_text(self) -> bool:
        """Whether the method looks at activations."""
        return self.method != MAGNITUDE
