"""Attention in which decoding sequences see the pages whose keys could score most, and no others.

Attention over chosen pages on CUDA: bounds of what was written, a choice for each decode, attention over it.

Grids follow from shapes alone, so that a step can be captured in a CUDA graph; what is chosen never leaves the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention import decode_cuda as decode_attention_cuda
from strata.kernels.attention import mixed as attention_mixed
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse.by_sequence import by_sequence, over_chosen
from strata.kernels.attention.sparse.page_choice import PageChoice, chosen_pages, page_scores, write_bounds
from strata.kernels.attention.sparse.pages_triton import (
    BOUNDS_WARPS,
    SCORED_PAGES,
    SCORES_WARPS,
    choice_warps,
    chosen_pages_kernel,
    page_bounds_kernel,
    page_scores_kernel,
)
from strata.kernels.attention.spec import AttentionSpec, SparseCall, pages_of
from strata.kernels.attention.varlen_triton import head_pad
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.op import operation
from strata.kernels.state.paged import PagedKV

# Places that a program chooses among at least, so that one variant of the kernel serves all shorter sequences.
_MIN_PLACES = 4096
# Programs that score pages, enough for every multiprocessor many times: tables of captured steps have room for the
# longest sequence, and a program for each of their parts would mostly find nothing.
_SCORE_PROGRAMS = 4096


def supports(call: SparseCall[PageChoice]) -> bool:
    pages = call.batch.pages
    whole = call.whole
    return attention_cuda.supports(whole) and (
        pages is None or (not pages.is_quantized and call.spec.window is None and attention_cuda.fits_decode(whole))
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


def scratch_bytes(sequences: int, max_keys: int, page_size: int, kv_heads: int, choice: PageChoice) -> int:
    """What choosing needs in a step of so many decodes, of sequences of at most so many keys."""
    most = ceil_div(max_keys, page_size)
    return 4 * sequences * (kv_heads * (most + choice.pages) + 1) if most > choice.pages else 0


def attend(call: SparseCall[PageChoice]) -> Tensor:
    q, _, _, batch, spec, choice, sinks = call
    pages, whole = batch.pages, call.whole
    if pages is None:
        return attention_cuda.attend(whole)
    _write_bounds(pages, batch.offsets, len(q), spec.layer)
    if attention_cuda.all_decode(whole):
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decode(out, q, pages, spec, choice, sinks)
        return out
    if not attention_mixed.supports(whole):
        return attention_cuda.attend(whole)
    return attention_mixed.attend(whole, partial(decode, choice=choice))


def _write_bounds(pages: PagedKV, offsets: Tensor, tokens: int, layer: int) -> None:
    """As `write_bounds`, of a batch of so many tokens."""
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
    places = max(_MIN_PLACES, next_power_of_2(most))
    chosen_pages_kernel[(kv_heads, sequences)](
        *(scores, chosen, seen, pages.lengths, tables, tables.stride(0), most),
        COUNT=choice.pages,
        PAGE_SIZE=size,
        PLACES=places,
        num_warps=choice_warps(places),
    )
    return replace(pages, tables=chosen, lengths=seen)


def _cost(call: SparseCall[PageChoice], *, workload: Workload) -> Cost:
    """Decodes over their chosen pages, and over the bounds of all; of pages that are written, the bounds are, from all
    keys in them."""
    q, k, pages = call.q, call.k, call.batch.pages
    if pages is None:
        return attention.cost(*call.whole, workload=workload)
    size, kept = pages.page_size, call.choice.pages * pages.page_size
    cut = [min(total, kept) if new == 1 else total for new, total in zip(workload.new, workload.total, strict=True)]
    cost = attention.cost(*call.whole, workload=Workload(workload.new, tuple(cut)))
    heads, row = q.shape[1], k.shape[1] * k.shape[2] * k.element_size()
    looked = sum(-(-total // size) for total, less in zip(workload.total, cut, strict=True) if less < total)
    written = sum(-(-new // size) for new in workload.new)
    seen, found = 2 * looked * row, written * size * row
    return cost + Cost(4 * heads * q.shape[2] * looked, seen + found, 2 * written * row, cached=seen)


@operation(_cost, operands=SparseCall, mutates=("batch",), reads_state=True)
def page_sparse_attention(call: SparseCall[PageChoice]) -> Tensor:
    """As `attention` over pages, where the query of a sequence with one new token sees the keys of `choice.pages` of
    its pages, for each KV head its own; others see all.

    The bounds of pages that this step wrote are written (`PagedKV.bounds`), so each step of a sequence has to run this
    in the layer. spec: without a window. Without pages all keys are seen.
    """
    return _attend(call, attention.reference)


def _attend(call: SparseCall[PageChoice], whole: Callable[..., Tensor]) -> Tensor:
    if call.batch.pages is not None:
        write_bounds(call.batch.pages, call.batch.offsets, call.spec.layer)
    return by_sequence(call, whole, _decode)


def _decode(call: SparseCall[PageChoice], total: int) -> Tensor | None:
    """One token of one sequence, over the pages that each KV head has chosen."""
    q, k, pages, count = call.q, call.k, pages_of(call.batch), call.choice.pages
    size, group = pages.page_size, q.shape[1] // k.shape[1]
    if len(q) != 1 or total <= count * size:
        return None
    out, table = torch.empty_like(q), pages.tables[0, : -(-total // size)].long()
    precision = torch.promote_types(q.dtype, torch.float32)
    for kv_head in range(k.shape[1]):
        members = slice(kv_head * group, (kv_head + 1) * group)
        bounds = pages.bounds[call.spec.layer][table][:, :, kv_head].to(precision)
        used = chosen_pages(page_scores(q[0, members].to(precision) * call.spec.scale, bounds), count)
        out[:, members] = over_chosen(call, kv_head, slice(0, 1), table[used], count * size - (-total % size))
    return out


page_sparse_attention.implement("pages", "cpu")(partial(_attend, whole=attention.bind("cpu")))
page_sparse_attention.in_triton(attend, supports=supports, kernels=kernels)
