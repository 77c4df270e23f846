"""Which weights of a matrix become zeros: those with the least scores."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.quant.two_of_four import least_two_of_four
from strata.models.pruned.settings import TWO_OF_FOUR, Pruning


def by_magnitude(weight: Tensor, pruning: Pruning) -> Tensor:
    """The weight [out, width] without its smallest, of the whole matrix (or of each four columns of a row)."""
    gone = least(weight.abs().flatten(), pruning)
    return weight.masked_fill(gone.view(weight.shape), 0.0)


def wanda(weight: Tensor, pruning: Pruning, mean_squares: Tensor) -> Tensor:
    """The weight without those of least `|W| * |x|` in each row (Sun et al. 2023, arXiv 2306.11695, equation 1).

    mean_squares: [width], of what each column is multiplied by; the root of their sum is the paper's norm, but for a
    factor of all columns alike.
    """
    scores = weight.abs() * mean_squares.to(weight).sqrt()
    return weight.masked_fill(least(scores, pruning), 0.0)


def least(scores: Tensor, pruning: Pruning) -> Tensor:
    """True at the share of the least of each row [..., width], or of each four columns; of equal ones at the first."""
    if pruning.pattern == TWO_OF_FOUR:
        return least_two_of_four(scores)
    order = scores.argsort(dim=-1, stable=True)[..., : round(pruning.share * scores.shape[-1])]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
