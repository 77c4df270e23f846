"""Attention of a step with prompts on CUDA: launches whose grids hold any batch of its size.

The sequences that decode split their keys; then the prompts' rows are computed, by cuDNN or in tiles of the kernel over
pages. In a captured step only the device knows which sequences decode (`BatchSplit`): there each gets the programs of a
decode, of which those for prompts find no keys, and what they leave in the prompts' rows is overwritten. A pure prefill
step has none. cuDNN leaves rows of padding as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import cudnn_prompts
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention.prompt_keys import gather_prompt_keys_kernel, prompt_keys_bytes
from strata.kernels.attention.query_chunks import QueryChunks, gathered_keys
from strata.kernels.attention.spec import AttentionCall, AttentionOperands, AttentionSpec, pages_of
from strata.kernels.attention.varlen_triton import attention_kernel
from strata.kernels.op import CUDNN
from strata.kernels.state.paged import PagedKV


def supports(call: AttentionOperands) -> bool:
    pages = call.batch.pages
    return (
        pages is not None
        and pages.parts is not None
        and pages.tables.shape[0] <= call.q.shape[0]
        and attention_cuda.supports(call)
        and attention_cuda.fits_decode(call)
    )


def kernels(call: AttentionCall) -> tuple[Any, ...]:
    pages = pages_of(call.batch)
    decodes = attention_cuda.decode_kernels(call, may_decode(pages))
    return (*decodes, *prompt_kernels(call))


def prompt_kernels(call: AttentionCall) -> tuple[Any, ...]:
    """What attends for the rows that are no decodes."""
    chunks = _query_chunks(call)
    if chunks is None:
        return (attention_kernel,)
    return (CUDNN,) if chunks.rows.pure_prefill else (gather_prompt_keys_kernel, CUDNN)


def scratch(call: AttentionCall) -> int:
    """What the splits of decodes wait in, and, once these are joined, the keys and values of prompts."""
    pages = pages_of(call.batch)
    decodes = attention_cuda.decode_scratch(call, may_decode(pages))
    chunks = _query_chunks(call)
    if chunks is None or chunks.rows.pure_prefill:
        return decodes
    row = call.k.shape[1] * call.k.shape[2]
    keys = gathered_keys(pages.tables.shape[-1] * pages.page_size, row)
    return max(decodes, prompt_keys_bytes(keys, row, call.q.element_size()))


def may_decode(pages: PagedKV) -> int:
    """How many sequences, the first of the batch, get the programs of a decode."""
    assert pages.parts is not None
    known = pages.parts.decodes
    return pages.tables.shape[0] if known is None else known


def _query_chunks(call: AttentionCall) -> QueryChunks | None:
    """The prompts as cuDNN attends for them; None if the kernel over pages does."""
    pages = pages_of(call.batch)
    assert pages.parts is not None
    return pages.parts.query_chunks if cudnn_prompts.takes(pages, call.spec, call.sinks) else None


def _decode(out: Tensor, q: Tensor, pages: PagedKV, spec: AttentionSpec, sinks: Tensor | None) -> None:
    decode_attention_cuda.decode(q.flatten(1), q.shape[1], q.shape[2], pages, spec, out=out, sinks=sinks)


def attend(call: AttentionCall, decode: Callable[..., None] = _decode) -> Tensor:
    """decode: what attends for the sequences that decode, by the names of `_decode`."""
    q, k, v, batch, spec, sinks = call
    pages = pages_of(batch)
    parts = pages.parts
    assert parts is not None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    count = may_decode(pages)
    if count:
        rows = slice(0, count)
        decodes = replace(pages, tables=pages.tables[rows], lengths=parts.decode_lengths[rows])
        decode(out=out[rows], q=q[rows], pages=decodes, spec=spec, sinks=sinks)
    chunks = _query_chunks(call)
    if chunks is None or not cudnn_prompts.has_planned_strides(q, k, v, chunks):
        attention_cuda.prefill(out, q, k, v, parts.starts, batch, spec, parts.bounds, sinks)
    else:
        cudnn_prompts.attend(out, q, k, v, pages, chunks, spec)
    return out
