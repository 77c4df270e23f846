"""SparseGPT (Frantar and Alistarh 2023, arXiv 2301.00774): later columns make up for the weights that are taken out."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.quant.two_of_four import FOUR, least_two_of_four
from strata.models.pruned.choice import least
from strata.models.pruned.settings import TWO_OF_FOUR, Pruning
from strata.models.quantized.calibrate.gptq import inverse_factor

# Columns among which weights are chosen at a time, without 2:4; and whose errors reach the others together.
_BLOCK = 128


def sparsegpt(weight: Tensor, pruning: Pruning, gram: Tensor, rows: int) -> Tensor:
    """A float32 weight [out, width] with zeros, and others changed so that its products change least.

    gram: [width, width] float32, the sum of x x^T over `rows` rows x that the weight is multiplied by; H is 2 / rows of
    it. Taken out are the weights of least `w^2 / [H^-1]_jj` (Optimal Brain Surgeon, Hassibi and Stork 1992, of what is
    left of H at column j), of each block of 128 columns, or two of each four. Columns that are multiplied by 0 alone
    become 0, as in the authors' code. Raises ValueError where H cannot be inverted though it is damped.
    """
    work, hessian = weight.clone(), gram * (2.0 / max(1, rows))
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1.0
    work[:, dead] = 0.0
    factor = inverse_factor(hessian)
    width = work.shape[1]
    for first in range(0, width, _BLOCK):
        end = min(first + _BLOCK, width)
        errors = _prune_block(work[:, first:end], pruning, factor[first:end, first:end])
        work[:, end:] -= errors @ factor[first:end, end:]
    return work


def _prune_block(block: Tensor, pruning: Pruning, factor: Tensor) -> Tensor:
    """Prune columns in place; returns what each loses, in units of the factor's diagonal, [out, columns]."""
    errors, diagonal = torch.zeros_like(block), factor.diagonal()
    in_fours = pruning.pattern == TWO_OF_FOUR
    if in_fours:
        gone = torch.zeros_like(block, dtype=torch.bool)
    else:
        gone = least((block / diagonal).square().flatten(), pruning).view(block.shape)
    for column in range(block.shape[1]):
        if in_fours and column % FOUR == 0:
            four = slice(column, column + FOUR)
            gone[:, four] = least_two_of_four((block[:, four] / diagonal[four]).square())
        lost = block[:, column].masked_fill(~gone[:, column], 0.0)
        block[:, column] -= lost
        errors[:, column] = lost / diagonal[column]
        block[:, column + 1 :] -= torch.outer(errors[:, column], factor[column, column + 1 :])
    return errors
