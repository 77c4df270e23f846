"""A result with the gradients of a placeholder: what the backward pass needs is saved before the result is there.

A layer that is computed again ends where the last tensor is saved (`torch.utils.checkpoint` stops early), so its last
product is not computed again if that comes after. An autograd function saves when it has ended, product and all.
"""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def placeholder(like: Tensor, *shape: int) -> Tensor:
    """A tensor of `like`'s dtype that has a shape and a single element; for an autograd function to return."""
    return like.new_empty(()).expand(shape)


def with_gradients_of(placeholder: Tensor, result: Tensor) -> Tensor:
    """`result`, computed without gradients; its gradient goes to the placeholder, of the same shape."""
    return _GradientsOfPlaceholder.apply(placeholder, result)


class _GradientsOfPlaceholder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, result: Tensor) -> Tensor:
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
