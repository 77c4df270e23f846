"""What autograd keeps, counted by the memory that it holds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from strata.kernels.fused import storage_of


def saved_bytes(run: Callable[[], Tensor], model: nn.Module | None = None) -> int:
    """Of the gradients of what `run` computes, without the parameters of a model, which are there anyway."""
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    own = set() if model is None else {storage_of(one) for one in model.parameters()}
    return sum({storage_of(one): one.untyped_storage().nbytes() for one in kept if storage_of(one) not in own}.values())
