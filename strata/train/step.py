"""One optimizer step over packed batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strata.kernels.loss import linear_cross_entropy
from strata.models.layers import CausalLM
from strata.train.optim import Optimizer
from strata.train.pack import PackedBatch


def head_weight(model: CausalLM) -> Tensor:
    """[vocab, hidden]: the head's own matrix, or the embedding's when they are tied."""
    return model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight


def accumulate_gradients(model: CausalLM, optimizer: Optimizer, batches: Sequence[PackedBatch]) -> Tensor:
    """Forward and backward of every batch. Returns the loss: the mean over all counted tokens of the step, [] float32.

    Each token weighs the same however the documents are split into batches. Only hidden states whose successor counts
    reach the head.
    """
    device = head_weight(model).device
    counted = sum(len(batch.targets) for batch in batches)
    loss = torch.zeros((), dtype=torch.float32, device=device)
    for packed in batches:
        batch, rows, targets = packed.to(device)
        hidden = model(batch).index_select(0, rows)
        part = linear_cross_entropy(hidden, head_weight(model), targets).sum() / counted
        part.backward()
        optimizer.accumulate()
        loss += part.detach()
    return loss


def train_step(
    model: CausalLM, optimizer: Optimizer, batches: Sequence[PackedBatch], learning_rate: float
) -> tuple[Tensor, Tensor]:
    """One step. Returns loss and gradient norm before clipping, [] float32 on the device; does not wait for them."""
    loss = accumulate_gradients(model, optimizer, batches)
    return loss, optimizer.step(learning_rate)
