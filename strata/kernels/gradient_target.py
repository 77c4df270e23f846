"""Where a backward pass puts the gradient of a weight, if not with autograd."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

# Contiguous memory of a weight's shape, in its dtype or float32, and whether to add to what it holds.
Memory = tuple[Tensor, bool]


class GradientTarget(Protocol):
    """Takes the gradient of one weight: a backward pass asks for its memory, writes there and says so."""

    def memory(self) -> Memory:
        """Where the gradient of this pass belongs."""

    def written(self) -> None:
        """It is there."""
