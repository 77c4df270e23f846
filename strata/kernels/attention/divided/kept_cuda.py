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
from strata.kernels.attention.spec import KeptCall, pages_of
from strata.kernels.attention.varlen_triton import attention_kernel


def supports(call: KeptCall) -> bool:
    pages = call.batch.pages
    is_plain = pages is not None and not pages.is_rounded
    return is_plain and attention_cuda.supports(call) and attention_cuda.fits_decode(call)


def _decodes(call: KeptCall) -> int:
    """How many sequences, the first of the batch, get the programs of a decode."""
    pages = pages_of(call.batch)
    if attention_cuda.all_decode(call):
        return call.q.shape[0]
    return 0 if pages.parts is None else may_decode(pages)


def kernels(call: KeptCall) -> tuple[Any, ...]:
    decodes = attention_cuda.decode_kernels(call, _decodes(call))
    return decodes if attention_cuda.all_decode(call) else (*decodes, attention_kernel)


def scratch(call: KeptCall) -> int:
    """What the splits of decodes wait in."""
    return attention_cuda.decode_scratch(call, _decodes(call))


def attend(call: KeptCall) -> tuple[Tensor, Tensor]:
    """Decodes in splits of their keys, prompts in tiles of their queries."""
    q, k, v, batch, spec, kept = call
    pages = pages_of(batch)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    count = _decodes(call)
    every, parts = attention_cuda.all_decode(call), pages.parts
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
