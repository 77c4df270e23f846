"""The ids that a step reads: those the host sent, and those that an earlier step drew and only the device knows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def _cost(tokens: Tensor, sources: Tensor, newest: Tensor, *, workload: Workload) -> Cost:
    return Cost(flops=0, read=tokens.nbytes + sources.nbytes + tokens.nbytes, written=tokens.nbytes)


@operation(_cost)
def newest_tokens(tokens: Tensor, sources: Tensor, newest: Tensor) -> Tensor:
    """The id at `newest[source]` where a source is not negative, else the token: all int32, [tokens] -> [tokens].

    newest [slots] holds `NO_ID` where nothing could be drawn: that sequence has ended, and reads id 0.
    """
    return torch.where(sources >= 0, newest[sources.clamp(min=0)].clamp(min=0), tokens)


newest_tokens.implement("torch", "cpu", invariant=True)(newest_tokens.reference)

_BLOCK = 256


# The inputs of a step are views of one buffer, at any address.
@partial(jit, unspecialized=("tokens", "sources", "count"))
def newest_tokens_kernel(tokens, sources, newest, result, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = offset < count
    source = tl.load(sources + offset, mask=held, other=-1)
    drawn = tl.load(newest + source, mask=source >= 0, other=0)
    token = tl.load(tokens + offset, mask=held & (source < 0), other=0)
    tl.store(result + offset, tl.where(source >= 0, tl.maximum(drawn, 0), token), mask=held)


def _triton(tokens: Tensor, sources: Tensor, newest: Tensor) -> Tensor:
    result = tokens.new_empty(tokens.shape)
    count = tokens.numel()
    if count:
        newest_tokens_kernel[(ceil_div(count, _BLOCK),)](tokens, sources, newest, result, count, BLOCK=_BLOCK)
    return result


if HAS_TRITON:
    newest_tokens.implement("triton", "cuda", invariant=True, kernels=(newest_tokens_kernel,))(_triton)
