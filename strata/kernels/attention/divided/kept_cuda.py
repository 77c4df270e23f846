"""Attention to the keys that a rank keeps, on CUDA: the kernels of `attention` over pages, which tell their sums too.

Grids follow from shapes alone, so that a step can be recorded in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.mixed import may_decode
from strata.kernels.attention.spec import AttentionSpec, PackedBatch
from strata.kernels.attention.varlen_triton import attention_kernel
from strata.kernels.state.kept_keys import KeptKeys


def supports(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec, kept: KeptKeys) -> bool:
    pages = batch.pages
    return (
        pages is not None
        and not pages.is_rounded
        and attention_cuda.supports(q, k, v, batch, spec)
        and decode_attention_cuda.fits(pages, q.shape[1], k.shape[1], q.shape[2])
    )


def _decodes(q: Tensor, k: Tensor, batch: PackedBatch) -> int:
    """How many sequences, the first of the batch, get the programs of a decode."""
    assert batch.pages is not None
    if attention_cuda.all_decode(q, k, batch):
        return q.shape[0]
    return 0 if batch.pages.parts is None else may_decode(batch.pages)


def kernels(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec, kept: KeptKeys
) -> tuple[Any, ...]:
    assert batch.pages is not None
    sizes = (q.shape[1], q.shape[2], k.shape[1])
    decodes = decode_attention_cuda.kernels(q, *sizes, batch.pages, _decodes(q, k, batch))
    return decodes if attention_cuda.all_decode(q, k, batch) else (*decodes, attention_kernel)


def scratch(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec, kept: KeptKeys) -> int:
    """What the splits of decodes wait in."""
    assert batch.pages is not None
    decodes = _decodes(q, k, batch)
    if not decodes:
        return 0
    return decode_attention_cuda.scratch(q, q.shape[1], q.shape[2], k.shape[1], batch.pages, decodes)


def attend(
    q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec, kept: KeptKeys
) -> tuple[Tensor, Tensor]:
    """Decodes in splits of their keys, prompts in tiles of their queries."""
    pages = batch.pages
    assert pages is not None
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    count = _decodes(q, k, batch)
    every, parts = attention_cuda.all_decode(q, k, batch), pages.parts
    if count:
        rows = slice(0, count)
        own = pages
        if not every:
            assert parts is not None
            own = replace(pages, tables=pages.tables[rows], lengths=parts.decode_lengths[rows])
        decode_attention_cuda.decode(
            q[rows].flatten(1), q.shape[1], q.shape[2], own, spec, out=out[rows], sums=sums[rows], kept=kept
        )
    if not every:
        starts, bounds = (batch.offsets, None) if parts is None else (parts.starts, parts.bounds)
        attention_cuda.prefill(out, q, k, v, starts, batch, spec, bounds, sums=sums, kept=kept)
    return out, sums
