"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): what activations have too much of, weights take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The paper's alpha for most models, and llm-compressor's default.
STRENGTH = 0.5
_LEAST = 1e-5


def smoothing(largest: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """What each column of activations is divided by, and that of the weights multiplied by: [width] float32.

    `max|X_j|^alpha / max|W_j|^(1 - alpha)` (equation 4). largest: [width], of the activations' magnitudes. weights:
    [out, width] each, all that multiply them.
    """
    columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    factors = largest.clamp(min=_LEAST) ** STRENGTH / columns.clamp(min=_LEAST) ** (1 - STRENGTH)
    return factors.clamp(min=_LEAST)
