"""What optimizers know of the shards of parameters that they change, and by what gradients are multiplied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strata.parallel.data_parallel import ParameterShard

EMBEDDING = "model.embed_tokens.weight"


def decay_of(shard: ParameterShard, decay: float) -> float:
    """Decay of norms, of biases and of the embedding's rows that a step has not seen would only shrink them."""
    return decay if len(shard.shape) > 1 and shard.name != EMBEDDING else 0.0


def gradient_of(shard: ParameterShard) -> Tensor:
    """Of the shard, flat. Raises RuntimeError if there is none."""
    if shard.master.grad is None:
        raise RuntimeError(f"the gradient of {shard.name} is missing; reduce the gradients before the update")
    return shard.master.grad.view(-1)


def has_separate_master(shard: ParameterShard) -> bool:
    """Whether the master is other memory than the weight."""
    return shard.master.data_ptr() != shard.weight.data_ptr()


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat view of contiguous tensors that lie one after another in one memory; None if they do not."""
    first, end = tensors[0], tensors[0].data_ptr()
    memory = first.untyped_storage().data_ptr()
    for one in tensors:
        if one.data_ptr() != end or one.untyped_storage().data_ptr() != memory or one.dtype != first.dtype:
            return None
        end += one.nbytes
    return torch.as_strided(first, (sum(one.numel() for one in tensors),), (1,), first.storage_offset())


def clip_scale(norm: Tensor, most: float) -> Tensor:
    """min(1, most / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` has it, and 0 where the norm is not finite; []
    as `norm`, on its device, not waited for: what a gradient is multiplied by before an update.
    """
    return torch.where(norm.isfinite(), (most / (norm + 1e-6)).clamp(max=1.0), 0)
