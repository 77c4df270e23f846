"""Deterministic attention on CUDA: a token's bits are the same in any batch, prefilled or decoded, chunked or whole.

Prompts run in one launch, decoding sequences in another that gives the same bits with the keys divided among programs;
grids follow from shapes alone, so that a step can be captured in a CUDA graph.

Each segment of a sequence's keys has a softmax of its own, computed by the same instructions whether a program goes
through all of them (`attention_kernel`) or has one; and they are joined one by one, from the first on, by the same
arithmetic. A product and a sum that a compiler might round once or twice are written as one `fma`, because it
may decide otherwise in another kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.attention import cuda as attention_cuda
from strata.kernels.attention.softmax_triton import (
    SEGMENT_KEYS,
    SEGMENTS,
    attend_block,
    join_segments,
    join_sink,
    no_keys,
    segment_at,
    segment_start,
)
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences
from strata.kernels.attention.varlen_triton import LOG2_E, attention_kernel, head_pad, invariant_tile
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.split_counters import MAX_COUNTERS, split_counters
from strata.kernels.state.paged import PagedKV
from strata.kernels.triton_import import jit, tl


@jit
def _store(out, result, weight, token, head, heads, held, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    columns = tl.arange(0, HEAD_PAD)
    result = result / tl.where(weight == 0.0, 1.0, weight)[:, None]
    target = out + ((token * heads + head) * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=held[:, None] & (columns < HEAD_DIM)[None, :])


@partial(jit, unspecialized=("offsets", "lengths", "tables", "table_stride"))
def batch_invariant_decode_kernel(
    q,
    k,
    v,
    k_exponents,
    v_exponents,
    out,
    maxima,
    weights,
    results,
    counters,
    offsets,
    lengths,
    tables,
    sinks,
    scale,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    JOIN_ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Programs [kv_heads, parts, sequences]: one query over the keys of one part.

    maxima, weights [sequences, parts, heads] and results [sequences, parts, heads, HEAD_DIM] float32: where the parts
    of a sequence wait for the last of its programs, which joins them, UNROLL at a time. counters: of `split_counters`.
    """
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(offsets + sequence)
    new = tl.load(offsets + sequence + 1) - first
    total = tl.load(lengths + sequence)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(total - WINDOW, 0)
    start = tl.maximum(segment_start(part, SEGMENT_KEYS, SEGMENTS), lowest // BLOCK_N * BLOCK_N)
    end = tl.minimum(segment_start(part + 1, SEGMENT_KEYS, SEGMENTS), total)
    # A padding row has no keys, and one program that says so.
    if (new == 0) | (start >= end) & ((total > 0) | (part > 0)):
        return
    row = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, HEAD_PAD)
    head = kv_head * GROUP + row
    held = row < GROUP
    mask = held[:, None] & (columns < HEAD_DIM)[None, :]
    token = first.to(tl.int64)
    queries = tl.load(q + token * q_stride + (head * HEAD_DIM)[:, None] + columns[None, :], mask=mask, other=0.0)
    at = tl.full((BLOCK_M,), 0, tl.int32) + total - 1
    k += kv_head * HEAD_DIM
    v += kv_head * HEAD_DIM
    if k_exponents is not None:
        k_exponents += kv_head * PAGE_SIZE
        v_exponents += kv_head * PAGE_SIZE
    table = tables + sequence * table_stride

    maximum, weight, result = no_keys(BLOCK_M, HEAD_PAD)
    for block in range(start, end, BLOCK_N):
        maximum, weight, result = attend_block(
            queries, at, maximum, weight, result, block, total, k, v,
            k_exponents, v_exponents, first, table, scale, k_stride, v_stride,
            True, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N, True,
        )  # fmt: skip
    heads = tl.num_programs(0) * GROUP
    first_part = segment_at(lowest, SEGMENT_KEYS, SEGMENTS)
    last_part = segment_at(tl.maximum(total - 1, 0), SEGMENT_KEYS, SEGMENTS)
    if first_part == last_part:
        if sinks is not None:
            maximum, weight, result = join_sink(maximum, weight, result, sinks, head, held)
        _store(out, result, weight, token, head, heads, held, HEAD_DIM, HEAD_PAD)
        return

    base = sequence.to(tl.int64) * tl.num_programs(1)
    target = (base + part) * heads + head
    tl.store(maxima + target, maximum, mask=held)
    tl.store(weights + target, weight, mask=held)
    tl.store(results + (target * HEAD_DIM)[:, None] + columns[None, :], result, mask=mask)
    tl.debug_barrier()  # all threads have stored before one of them says so
    counter = counters + sequence * tl.num_programs(0) + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") < last_part - first_part:
        return
    tl.store(counter, 0)
    row = tl.arange(0, JOIN_ROWS)
    head = kv_head * GROUP + row
    held = row < GROUP
    mask = held[:, None] & (columns < HEAD_DIM)[None, :]
    joined_maximum, joined_weight, joined_result = no_keys(JOIN_ROWS, HEAD_PAD)
    for some in range(first_part, last_part + 1, UNROLL):
        # Unrolled so that the loads of several parts are under way together; a part past the last is empty.
        for index in tl.static_range(UNROLL):
            there = held & (some + index <= last_part)
            source = (base + some + index) * heads + head
            part_maximum = tl.load(maxima + source, mask=there, other=float("-inf"), cache_modifier=".cg")
            part_weight = tl.load(weights + source, mask=there, other=0.0, cache_modifier=".cg")
            part_result = tl.load(
                results + (source * HEAD_DIM)[:, None] + columns[None, :],
                mask=mask & (some + index <= last_part),
                other=0.0,
                cache_modifier=".cg",
            )
            joined_maximum, joined_weight, joined_result = join_segments(
                joined_maximum, joined_weight, joined_result, part_maximum, part_weight, part_result
            )
    if sinks is not None:
        joined_maximum, joined_weight, joined_result = join_sink(
            joined_maximum, joined_weight, joined_result, sinks, head, held
        )
    _store(out, joined_result, joined_weight, token, head, heads, held, HEAD_DIM, HEAD_PAD)


def supports(call: AttentionCall) -> bool:
    # The kernels find the largest score before they scale it.
    return call.spec.scale > 0 and attention_cuda.supports(call)


def kernels(call: AttentionCall) -> tuple[Any, ...]:
    batch, pages = call.batch, call.batch.pages
    decodes = 0 if pages is None else _decodes(batch.offsets.shape[0] - 1, batch.longest, pages, call.k.shape[1])
    return (batch_invariant_decode_kernel,) * (decodes > 0) + (attention_kernel,) * (decodes < len(call.q))


def attend(call: AttentionCall) -> Tensor:
    """As `attention`. Which of the two kernels takes a sequence does not change its bits."""
    q, k, v, batch, spec, sinks = call
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    offsets, pages = batch.offsets, batch.pages
    decodes, sequences = 0, offsets.shape[0] - 1
    if pages is not None:
        decodes = _decodes(sequences, batch.longest, pages, k.shape[1])
        if decodes:
            held = pages.sequences(0, decodes)
            _decode(out[:decodes], q[:decodes], offsets[: decodes + 1], held, spec, sinks)
        pages = pages.sequences(decodes, sequences)
    if decodes < len(q):
        others = Sequences(offsets[decodes:], batch.longest, pages)
        attention_cuda.prefill(out, q, k, v, others.offsets, others, spec, sinks=sinks, invariant=True)
    return out


def _decodes(sequences: int, longest: int, pages: PagedKV, kv_heads: int) -> int:
    """How many sequences at the start of the batch are known to have one token each, and get programs for each part."""
    known = sequences if longest == 1 else (pages.parts.decodes or 0) if pages.parts is not None else 0
    return known if known * kv_heads <= MAX_COUNTERS else 0


def _parts(max_keys: int) -> int:
    """Into how many parts a sequence of so many keys is divided."""
    return int(segment_at.fn(max(max_keys - 1, 0), SEGMENT_KEYS, SEGMENTS)) + 1


def scratch_bytes(sequences: int, max_keys: int, heads: int, head_dim: int) -> int:
    """What the parts of decoding sequences wait in, where a sequence may have so many keys."""
    return 4 * sequences * _parts(max_keys) * heads * (head_dim + 2)


def _decode(out: Tensor, q: Tensor, offsets: Tensor, pages: PagedKV, spec: AttentionSpec, sinks: Tensor | None) -> None:
    sequences, heads, head_dim = q.shape
    keys, values, tables = pages.keys[spec.layer], pages.values[spec.layer], pages.tables
    kv_heads = keys.shape[2]
    parts = _parts(tables.shape[1] * pages.page_size)
    scores = torch.empty((2, sequences, parts, heads), dtype=torch.float32, device=q.device)
    results = torch.empty((sequences, parts, heads, head_dim), dtype=torch.float32, device=q.device)
    tile = invariant_tile(head_dim, q.dtype, decode=True)
    batch_invariant_decode_kernel[(kv_heads, parts, sequences)](
        *(q, keys, values, *pages.exponents(spec.layer), out, *scores, results, split_counters(q.device)),
        *(offsets, pages.lengths, tables, sinks),
        *(spec.scale * LOG2_E, q.stride(0), kv_heads * head_dim, kv_heads * head_dim, tables.stride(0)),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad(head_dim),
        PAGE_SIZE=pages.page_size,
        WINDOW=spec.window or 0,
        SEGMENT_KEYS=SEGMENT_KEYS,
        SEGMENTS=SEGMENTS,
        JOIN_ROWS=next_power_of_2(heads // kv_heads),
        UNROLL=4,
        **tile.options,
    )
