"""Attention of prompts that start in this batch, by cuDNN: the fastest kernel where no key is cached yet."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from strata.kernels import attention_cuda
from strata.kernels.paged import PagedKV

# Below this a library call for each prompt costs more than one launch for all.
SHORTEST = 512
MOST_HEAD_DIM = 128


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    pages: PagedKV | None,
    layer: int,
    scale: float,
    window: int | None,
) -> bool:
    return (
        pages is not None
        and pages.prompts is not None
        and longest >= SHORTEST
        and (window is None or window >= longest)
        and q.dtype in (torch.bfloat16, torch.float16)
        and pages.keys[layer].dtype == q.dtype
        and q.shape[2] % 8 == 0
        and q.shape[2] <= MOST_HEAD_DIM
        and torch.backends.cudnn.is_available()
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    longest: int,
    pages: PagedKV | None,
    layer: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Decoding sequences in one launch, then prompts, neighbours of equal length in one call."""
    assert pages is not None
    assert pages.prompts is not None
    decodes, lengths = pages.prompts.decodes, pages.prompts.lengths
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if decodes:
        out[:decodes] = attention_cuda.decode(
            q[:decodes], offsets[: decodes + 1], pages.first(decodes), layer, scale, window
        )
    # What kv_write has just put into the pages, as one tensor again: far less than the attention moves.
    slots = pages.slots[decodes:]
    keys = pages.keys[layer].flatten(0, 1).index_select(0, slots)
    values = pages.values[layer].flatten(0, 1).index_select(0, slots)
    at = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        end = at + count * length
        rows = [
            x.unflatten(0, (count, length)).transpose(1, 2) for x in (q[decodes:][at:end], keys[at:end], values[at:end])
        ]
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(*rows, None, False, 0.0, True, False, scale=scale)[
            0
        ]
        out[decodes:][at:end] = result.transpose(1, 2).flatten(0, 1)
        at = end
    return out
