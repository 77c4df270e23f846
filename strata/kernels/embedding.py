"""Token embedding: one row of a table for each token id."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation


def _cost(tokens: Tensor, weight: Tensor, *, workload: Workload) -> Cost:
    vocab, hidden = weight.shape
    rows = min(tokens.numel(), vocab) * hidden * weight.element_size()
    written = tokens.numel() * hidden * weight.element_size()
    return Cost(read=tokens.nbytes + rows, written=written, weights=rows)


def _meta(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]), device="meta")


@operation(_cost, meta=_meta)
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """`weight[tokens]`: tokens [tokens] int32 or int64, weight [vocab, hidden] -> [tokens, hidden] of weight.dtype."""
    return F.embedding(tokens, weight)


@embedding.implement("gather", "cuda", invariant=True)
@embedding.implement("gather", "cpu", invariant=True)
def _gather(tokens: Tensor, weight: Tensor) -> Tensor:
    return torch.index_select(weight, 0, tokens)
