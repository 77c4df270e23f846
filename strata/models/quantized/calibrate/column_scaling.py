"""What columns are multiplied by before they are rounded, the inputs being divided by it.

AWQ (Lin et al. 2023, arXiv 2306.00978) makes columns larger that much goes through; SmoothQuant (Xiao et al. 2022,
arXiv 2211.10438) lets weights take what activations have too much of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strata.kernels.quant.quantized import Scheme, group_maxima, spread

_RATIOS = 20
_LEAST = 1e-4
# SmoothQuant's alpha for most models, and llm-compressor's default.
_STRENGTH = 0.5
_MIN_FACTOR = 1e-5


def scaling(
    magnitudes: Tensor, weights: Sequence[Tensor], scheme: Scheme, loss: Callable[[Tensor], float]
) -> Tensor | None:
    """AWQ: what columns of weights are multiplied by and those of activations divided by, [width] float32.

    None: nothing. magnitudes: [width], the mean of |x|. weights: [out, width] each, all that multiply x. loss: of
    factors, the error that rounding leaves with them. As the authors' code has it: of the ratios r = i / 20 the best,
    `x^r / (w^(1 - r) + 1e-4)`, w the mean over rows of |weight| / largest of its group, divided by the geometric mean
    of the largest and the least; and nothing at all if that is better yet (llm-compressor's identity).
    """
    shares = mean_shares(weights, scheme)
    best, least = None, loss(torch.ones_like(magnitudes))
    for step in range(_RATIOS):
        ratio = step / _RATIOS
        factors = (magnitudes**ratio / (shares ** (1 - ratio) + _LEAST)).clamp(min=_LEAST)
        factors = factors / (factors.amax() * factors.amin()).sqrt()
        found = loss(factors)
        if found < least:
            best, least = factors, found
    return best


def mean_shares(weights: Sequence[Tensor], scheme: Scheme) -> Tensor:
    """[width]: the mean over all rows of each column's magnitude as a share of the largest of its group."""
    total, rows = torch.zeros(weights[0].shape[1], dtype=torch.float64, device=weights[0].device), 0
    for weight in weights:
        sizes = weight.abs()
        largest = group_maxima(sizes, scheme).clamp(min=torch.finfo(torch.float32).tiny)
        total += (sizes / spread(largest, scheme, sizes.shape)).sum(0, dtype=torch.float64)
        rows += len(weight)
    return (total / rows).float()


def smoothing(largest: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """SmoothQuant: what each column of activations is divided by, and that of weights multiplied by, [width] float32.

    `max|X_j|^alpha / max|W_j|^(1 - alpha)` (equation 4). largest: [width], of the activations' magnitudes. weights:
    [out, width] each, all that multiply them.
    """
    columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    factors = largest.clamp(min=_MIN_FACTOR) ** _STRENGTH / columns.clamp(min=_MIN_FACTOR) ** (1 - _STRENGTH)
    return factors.clamp(min=_MIN_FACTOR)
