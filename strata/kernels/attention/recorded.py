"""Attention of a recorded step with prompts on CUDA: two launches whose grids hold any batch of the recorded size.

Which sequence decodes is read from device memory (`RecordedParts`). First each gets the programs of a decode, of which
those for prompts find no keys; then tiles of the prompts' rows, which also write what the first launch left in them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.batch_parts import RecordedParts
from strata.kernels.attention.decode_triton import decode_attention_kernel
from strata.kernels.attention.spec import AttentionSpec, PackedBatch
from strata.kernels.attention.varlen_triton import attention_kernel


def supports(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec) -> bool:
    pages = batch.pages
    return (
        pages is not None
        and isinstance(pages.parts, RecordedParts)
        and pages.tables.shape[0] <= q.shape[0]
        and attention_cuda.supports(q, k, v, batch, spec)
        and decode_attention_cuda.fits(pages, q.shape[1], k.shape[1], q.shape[2])
    )


def kernels(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec) -> tuple[Any, ...]:
    return (decode_attention_kernel, attention_kernel)


def attend(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
    pages = batch.pages
    assert pages is not None
    parts = pages.parts
    assert isinstance(parts, RecordedParts)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decodes, rows = replace(pages, lengths=parts.decode_lengths), slice(0, pages.tables.shape[0])
    decode_attention_cuda.decode(q[rows].flatten(1), q.shape[1], q.shape[2], decodes, spec, out=out[rows])
    attention_cuda.prefill(out, q, k, v, parts.starts, batch, spec, parts.bounds)
    return out
