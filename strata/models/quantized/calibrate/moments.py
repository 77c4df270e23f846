"""What is remembered of the activations that a product multiplies."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Sums over the rows of x [..., width] that a product was given.

    rows: how many. magnitudes, squares: [width] float64, sums of |x| and of x^2. largest: [width] float32, of |x|.
    gram: [width, width] float32, the sum of x x^T, or None if it was not asked for.
    """

    def __init__(self, width: int, device: torch.device, *, gram: bool) -> None:
        self.rows = 0
        self.magnitudes = torch.zeros(width, dtype=torch.float64, device=device)
        self.squares = torch.zeros(width, dtype=torch.float64, device=device)
        self.largest = torch.zeros(width, device=device)
        self.gram = torch.zeros(width, width, device=device) if gram else None

    @staticmethod
    def of(x: Tensor, *, gram: bool) -> Moments:
        """Those of x alone."""
        made = Moments(x.shape[-1], x.device, gram=gram)
        made.add(x)
        return made

    def add(self, x: Tensor) -> None:
        wide = x.reshape(-1, x.shape[-1]).float()
        if not len(wide):
            return
        self.rows += len(wide)
        sizes = wide.abs()
        self.magnitudes += sizes.sum(0, dtype=torch.float64)
        self.squares += sizes.square().sum(0, dtype=torch.float64)
        self.largest = torch.maximum(self.largest, sizes.amax(0))
        if self.gram is not None:
            self.gram.addmm_(wide.t(), wide)

    @property
    def mean_magnitudes(self) -> Tensor:
        """[width] float32, of |x|."""
        return (self.magnitudes / max(1, self.rows)).float()

    @property
    def mean_squares(self) -> Tensor:
        """[width] float32, of x^2."""
        return (self.squares / max(1, self.rows)).float()

    def divide(self, factors: Tensor) -> None:
        """As if every x had been divided by factors [width]."""
        self.magnitudes /= factors
        self.squares /= factors.double().square()
        self.largest = self.largest / factors
        if self.gram is not None:
            self.gram /= torch.outer(factors, factors)
