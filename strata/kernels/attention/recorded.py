"""Attention of a recorded step with prompts on CUDA: launches whose grids hold any batch of the recorded size.

Which sequence decodes is read from device memory (`RecordedParts`). First each gets the programs of a decode, of which
those for prompts find no keys; then the prompts' rows are computed, by cuDNN or in tiles of the kernel over pages,
which also write what the first launch left in them. cuDNN leaves rows of padding as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import cudnn_paged
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.batch_parts import RecordedParts
from strata.kernels.attention.decode_triton import decode_attention_kernel
from strata.kernels.attention.spec import AttentionSpec, PackedBatch
from strata.kernels.attention.varlen_triton import attention_kernel
from strata.kernels.attention.virtual_sequences import VirtualSequences
from strata.kernels.op import CUDNN
from strata.kernels.state.paged import PagedKV


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
    assert batch.pages is not None
    return (decode_attention_kernel, attention_kernel if _virtual(batch.pages, spec) is None else CUDNN)


def _virtual(pages: PagedKV, spec: AttentionSpec) -> VirtualSequences | None:
    """The prompts as cuDNN attends for them; None if the kernel over pages does."""
    assert isinstance(pages.parts, RecordedParts)
    return pages.parts.virtual if cudnn_paged.takes(pages, spec) else None


def attend(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
    pages = batch.pages
    assert pages is not None
    parts = pages.parts
    assert isinstance(parts, RecordedParts)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    decodes, rows = replace(pages, lengths=parts.decode_lengths), slice(0, pages.tables.shape[0])
    decode_attention_cuda.decode(q[rows].flatten(1), q.shape[1], q.shape[2], decodes, spec, out=out[rows])
    virtual = _virtual(pages, spec)
    if virtual is None or virtual.rows.queries != q.stride(0):
        attention_cuda.prefill(out, q, k, v, parts.starts, batch, spec, parts.bounds)
    else:
        cudnn_paged.attend(out, q, pages, virtual, spec)
    return out
