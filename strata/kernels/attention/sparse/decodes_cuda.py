"""Attention over chosen pages on CUDA: bounds of what was written, a choice for each decode, attention over it.

Grids follow from shapes alone, so that a step can be recorded in a CUDA graph; what is chosen never leaves the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention import mixed as attention_mixed
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.kernels.attention.sparse.pages_triton import (
    BOUNDS_WARPS,
    SCORED_PAGES,
    SCORES_WARPS,
    choice_warps,
    chosen_pages_kernel,
    page_bounds_kernel,
    page_scores_kernel,
)
from strata.kernels.attention.spec import AttentionSpec, SparseCall
from strata.kernels.attention.varlen_triton import head_pad
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.state.paged import PagedKV

# Places that a program chooses among at least, so that one variant of the kernel serves all shorter sequences.
_LEAST_PLACES = 4096
# Programs that score pages, enough for every multiprocessor many times: tables of recorded steps have room for the
# longest sequence, and a program for each of their parts would mostly find nothing.
_SCORE_PROGRAMS = 4096


def supports(call: SparseCall[PageChoice]) -> bool:
    pages = call.batch.pages
    whole = call.whole
    return attention_cuda.supports(whole) and (
        pages is None or (not pages.is_rounded and call.spec.window is None and attention_cuda.fits_decode(whole))
    )


def kernels(call: SparseCall[PageChoice]) -> tuple[Any, ...]:
    pages, choice, whole = call.batch.pages, call.choice, call.whole
    if pages is None:
        return attention_cuda.kernels(whole)
    chooses, every = _chooses(pages, choice), attention_cuda.all_decode(whole)
    if not every and not attention_mixed.supports(whole):
        return (page_bounds_kernel, *attention_cuda.kernels(whole))
    count = call.q.shape[0] if every else attention_mixed.may_decode(pages)
    decodes = attention_cuda.decode_kernels(whole, count, choice.pages if chooses else None)
    choosing = (page_scores_kernel, chosen_pages_kernel) * (chooses and count > 0)
    prompts = () if every else attention_mixed.prompt_kernels(whole)
    return (page_bounds_kernel, *choosing, *decodes, *prompts)


def scratch_bytes(sequences: int, most_keys: int, page_size: int, kv_heads: int, choice: PageChoice) -> int:
    """What choosing needs in a step of so many decodes, of sequences of at most so many keys."""
    most = ceil_div(most_keys, page_size)
    return 4 * sequences * (kv_heads * (most + choice.pages) + 1) if most > choice.pages else 0


def attend(call: SparseCall[PageChoice]) -> Tensor:
    q, _, _, batch, spec, choice, sinks = call
    pages, whole = batch.pages, call.whole
    if pages is None:
        return attention_cuda.attend(whole)
    write_bounds(pages, batch.offsets, len(q), spec.layer)
    if attention_cuda.all_decode(whole):
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode(out, q, pages, spec, choice, sinks)
        return out
    if not attention_mixed.supports(whole):
        return attention_cuda.attend(whole)
    return attention_mixed.attend(whole, partial(decode, choice=choice))


def write_bounds(pages: PagedKV, offsets: Tensor, tokens: int, layer: int) -> None:
    """As `strata.kernels.attention.sparse.page_choice.write_bounds`, of a batch of so many tokens."""
    keys, size, sequences = pages.keys[layer], pages.page_size, offsets.shape[0] - 1
    kv_heads, head_dim = keys.shape[2:]
    page_bounds_kernel[(tokens // size + 2 * sequences, kv_heads)](
        *(keys, pages.bounds[layer], offsets, pages.lengths, pages.tables),
        *(sequences, pages.tables.stride(0), kv_heads),
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad(head_dim),
        PAGE_SIZE=size,
        num_warps=BOUNDS_WARPS,
    )


def decode(
    out: Tensor, q: Tensor, pages: PagedKV, spec: AttentionSpec, choice: PageChoice, sinks: Tensor | None
) -> None:
    """The one token of each sequence, q [sequences, heads, head_dim], over its chosen pages, whose bounds are there."""
    heads, head_dim = q.shape[1:]
    over = choose(q, pages, spec, choice) if _chooses(pages, choice) else pages
    decode_attention_cuda.decode(q.flatten(1), heads, head_dim, over, spec, out=out, sinks=sinks)


def _chooses(pages: PagedKV, choice: PageChoice) -> bool:
    """Whether a sequence can have more pages than are chosen."""
    return pages.tables.shape[1] > choice.pages


def choose(q: Tensor, pages: PagedKV, spec: AttentionSpec, choice: PageChoice) -> PagedKV:
    """The same sequences with block tables of what is chosen for each KV head, and as many keys as that has."""
    (sequences, heads, head_dim), tables = q.shape, pages.tables
    kv_heads, size, most = pages.keys[spec.layer].shape[2], pages.page_size, tables.shape[1]
    scores = torch.empty((sequences, kv_heads, most), dtype=torch.float32, device=q.device)
    chosen = torch.empty((sequences, kv_heads, choice.pages), dtype=torch.int32, device=q.device)
    seen = torch.empty(sequences, dtype=torch.int32, device=q.device)
    programs = min(ceil_div(most, SCORED_PAGES), ceil_div(_SCORE_PROGRAMS, sequences * kv_heads))
    page_scores_kernel[(programs, kv_heads, sequences)](
        *(q, pages.bounds[spec.layer], scores, pages.lengths, tables),
        *(q.stride(0), tables.stride(0), most, choice.pages * size),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad(head_dim),
        PAGE_SIZE=size,
        PAGES=SCORED_PAGES,
        num_warps=SCORES_WARPS,
    )
    places = max(_LEAST_PLACES, next_power_of_2(most))
    chosen_pages_kernel[(kv_heads, sequences)](
        *(scores, chosen, seen, pages.lengths, tables, tables.stride(0), most),
        COUNT=choice.pages,
        PAGE_SIZE=size,
        PLACES=places,
        num_warps=choice_warps(places),
    )
    return replace(pages, tables=chosen, lengths=seen)
