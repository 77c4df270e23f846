"""Attention of a mixed step on CUDA, part by part, each with the kernel that suits it."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from strata.kernels import attention_cuda
from strata.kernels.paged import PagedKV

# Prompts shorter than this cost more as library calls of their own than in one launch for all.
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
        and pages.parts is not None
        and longest > 1
        and attention_cuda.supports(q, k, v, offsets, longest, pages, layer, scale, window)
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
    """Decoding sequences with split keys; fresh prompts by cuDNN, the fastest where no key is cached; then the rest."""
    assert pages is not None
    assert pages.parts is not None
    decodes, continued, fresh = pages.parts.decodes, pages.parts.continued, pages.parts.fresh
    if not _suits_cudnn(q, fresh, window):
        continued, fresh = continued + fresh, ()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if decodes:
        held = pages.sequences(0, decodes)
        out[:decodes] = attention_cuda.decode(q[:decodes], offsets[: decodes + 1], held, layer, scale, window)
    end = decodes
    if continued:
        last, end = decodes + len(continued), decodes + sum(continued)
        rows = (q[decodes:end], k[decodes:end], v[decodes:end], offsets[decodes : last + 1] - decodes)
        held = pages.sequences(decodes, last)
        out[decodes:end] = attention_cuda.attend(*rows, max(continued), held, layer, scale, window)
    if fresh:
        _attend_fresh(out[end:], q[end:], pages, layer, pages.slots[end:], fresh, scale)
    return out


def _suits_cudnn(q: Tensor, fresh: tuple[int, ...], window: int | None) -> bool:
    longest = max(fresh, default=0)
    return (
        longest >= SHORTEST
        and (window is None or window >= longest)
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] % 8 == 0
        and q.shape[2] <= MOST_HEAD_DIM
        and torch.backends.cudnn.is_available()
    )


def _attend_fresh(
    out: Tensor, q: Tensor, pages: PagedKV, layer: int, slots: Tensor, lengths: tuple[int, ...], scale: float
) -> None:
    """Neighbours of equal length in one call."""
    # What kv_write has just put into the pages, as one tensor again: far less than the attention moves.
    keys = pages.keys[layer].flatten(0, 1).index_select(0, slots)
    values = pages.values[layer].flatten(0, 1).index_select(0, slots)
    at = 0
    for length, same in groupby(lengths):
        count = len(list(same))
        rows = slice(at, at + count * length)
        query, key, value = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q, keys, values))
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        result: Tensor = cudnn(query, key, value, None, False, 0.0, True, False, scale=scale)[0]
        out[rows] = result.transpose(1, 2).flatten(0, 1)
        at = rows.stop
