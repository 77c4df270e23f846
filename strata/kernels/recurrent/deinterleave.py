"""Columns that stand group by group, brought together part by part, as a convolution and its state keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import operation


def _cost(x: Tensor, parts: tuple[int, ...], *, workload: Workload) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes)


def _meta(x: Tensor, parts: tuple[int, ...]) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * x.shape[2], device="meta")


@operation(_cost, meta=_meta, rowwise=True)
def deinterleave(x: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Of [tokens, groups, columns] the first part of all groups, then the second of all, ...: [tokens, groups *
    columns].

    parts: columns of each, which add up to all. So transformers' Qwen3NextGatedDeltaNet reads its products, in which
    the queries, keys, values and gates of a key head stand together.
    """
    return torch.cat([part.flatten(-2) for part in x.split(parts, -1)], -1)


for _device in ("cpu", "cuda"):
    deinterleave.implement("torch", _device, invariant=True, differentiable=True)(deinterleave.reference)
