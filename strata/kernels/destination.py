"""Where a backward pass puts the gradient of a weight, if not with autograd."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

# Contiguous memory of a weight's shape, in its dtype or float32, and whether to add to what it holds.
Place = tuple[Tensor, bool]


class Destination(Protocol):
    """Takes the gradient of one weight: a backward pass asks for the place, writes there and says so."""

    def place(self) -> Place:
        """Where the gradient of this pass belongs."""

    def filled(self) -> None:
        """It is there."""
