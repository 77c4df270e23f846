"""Which weights of a matrix become zeros: those with the least scores."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.quant.two_of_four import least_two_of_four
from strata.models.pruned.settings import TWO_OF_FOUR, Pruning


def by_magnitude(weight: Tensor, pruning: Pruning) -> Tensor:
    """The weight [out, width] without its smallest, of the whole matrix (or of each four columns of a row)."""
    return weight.masked_fill(least(weight.abs(), pruning), 0.0)


def wanda(weight: Tensor, pruning: Pruning, mean_squares: Tensor) -> Tensor:
    """The weight without those of least `|W| * |x|` in each row (Sun et al. 2023, arXiv 2306.11695, equation 1).

    mean_squares: [width], of what each column is multiplied by; the root of their sum is the paper's norm, but for a
    factor of all columns alike.
    """
    scores = weight.abs() * mean_squares.to(weight).sqrt()
    if pruning.pattern == TWO_OF_FOUR:
        return weight.masked_fill(least_two_of_four(scores), 0.0)
    return torch.stack([row.masked_fill(least(score, pruning), 0.0) for row, score in zip(weight, scores, strict=True)])


def least(scores: Tensor, pruning: Pruning) -> Tensor:
    """True at the share of the least scores, of all together or of each four columns; of equal ones at the first."""
    if pruning.pattern == TWO_OF_FOUR:
        return least_two_of_four(scores)
    order = scores.flatten().argsort(stable=True)
    gone = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    gone[order[: round(pruning.share * scores.numel())]] = True
    return gone.view(scores.shape)
