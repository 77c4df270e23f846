"""Multiplication by one number, which some families put behind the embedding or the head."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.kernels.activation.blocks import in_whole_vectors
from strata.kernels.op import elementwise, operation


@operation(elementwise(1), rowwise=True)
def scale(x: Tensor, factor: float) -> Tensor:
    """`x * factor`, the factor rounded to x.dtype first, as transformers' Gemma3TextScaledWordEmbedding does.

    x of any shape -> like x. In bfloat16 sqrt(3072) counts as 55.5.
    """
    return x * torch.tensor(factor, dtype=x.dtype).item()


@operation(elementwise(1), rowwise=True)
def times(x: Tensor, factor: float) -> Tensor:
    """`x * factor`, computed in float32 and rounded once, as torch multiplies by a Python number. x of any shape."""
    return x * factor


# A division, an exponential with what makes it a tanh, a product.
@operation(elementwise(6), rowwise=True)
def softcap(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)`, which keeps logits within -cap and cap (Gemma 2, Riviere et al. 2024). Like x."""
    return torch.tanh(x / cap) * cap


def _whole_tanh(x: Tensor, cap: float) -> Tensor:
    return in_whole_vectors(x / cap, torch.tanh_).mul_(cap)


scale.by_definition("cpu", "cuda", invariant=True, differentiable=True)
times.by_definition("cpu", "cuda", invariant=True, differentiable=True)
softcap.by_definition("cpu", differentiable=True)
softcap.implement("blocks", "cpu", invariant=True)(_whole_tanh)
softcap.by_definition("cuda", invariant=True, differentiable=True)
