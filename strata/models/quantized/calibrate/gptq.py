"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns are rounded in turn; later ones make up for the error."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.quant.quantized import QuantizedWeight, Scheme, pack_values, spread, to_nearest

_BLOCK = 128
# What is added to the diagonal, as a share of its mean; ten times as much each time that it was too little.
_DAMPING = 0.01
_TRIES = 4


def gptq(weight: Tensor, scheme: Scheme, scales: Tensor, gram: Tensor, rows: int) -> QuantizedWeight:
    """A float32 weight [out, width] in a scheme by these scales, rounded so that its products change least.

    gram: [width, width] float32, the sum of x x^T over `rows` rows x that the weight is multiplied by; H is 2 / rows
    of it. Columns are taken by falling diagonal of H (act-order); since the scales of all groups are there before,
    their order is not stored ("static" groups of llm-compressor). Columns that are multiplied by 0 alone become 0, as
    in the authors' code. Raises ValueError where H cannot be inverted though it is damped.
    """
    work, hessian = without_dead_columns(weight, gram, rows)
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    factor = inverse_factor(hessian[order][:, order])
    work = work[:, order]
    steps = spread(scales.float(), scheme, weight.shape).expand(weight.shape)[:, order]
    values = torch.empty_like(work)
    width = work.shape[1]
    for first in range(0, width, _BLOCK):
        end = min(first + _BLOCK, width)
        block, errors = work[:, first:end], torch.empty_like(work[:, first:end])
        for column in range(end - first):
            at = first + column
            step = steps[:, at]
            value = to_nearest(block[:, column] / step, scheme.values)
            values[:, at] = value
            error = (block[:, column] - value * step) / factor[at, at]
            block[:, column:] -= torch.outer(error, factor[at, at:end])
            errors[:, column] = error
        work[:, end:] -= errors @ factor[first:end, end:]
    unordered = torch.empty_like(values).index_copy_(1, order, values)
    return QuantizedWeight.of(scheme, pack_values(unordered, scheme.values), scales)


def without_dead_columns(weight: Tensor, gram: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A copy of a weight whose columns that are multiplied by 0 alone are 0, and H, 2 / rows of `gram`, with a 1 on the
    diagonal there."""
    work, hessian = weight.clone(), gram * (2.0 / max(1, rows))
    dead = hessian.diagonal() == 0
    hessian.diagonal()[dead] = 1.0
    work[:, dead] = 0.0
    return work, hessian


def inverse_factor(hessian: Tensor) -> Tensor:
    """U, upper triangular, with U^T U = H^-1, of the damped H. Raises ValueError where that cannot be had."""
    mean = hessian.diagonal().mean()
    for attempt in range(_TRIES):
        damped = hessian.clone()
        damped.diagonal().add_(mean * _DAMPING * 10**attempt)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper: Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
    raise ValueError("the calibration text gives a product inputs whose moments cannot be inverted (NaN or infinite?)")
