"""The Triton kernel of batch-invariant decoding, which leaves the bits that `attention_kernel` with PARTS leaves.

Each part of a sequence's keys has a softmax of its own, computed by the same instructions whether a program goes
through all parts (prefill) or has one of them (here); and the parts are joined one by one, from the first on, by the
same arithmetic. A product and a sum that a compiler might round once or twice are written as one `fma`, because it may
decide otherwise in another kernel.
"""

from __future__ import annotations

from functools import partial

from strata.kernels.attention.softmax_triton import attend_block, join_parts, join_sink, no_keys, part_at, part_start
from strata.kernels.triton_import import jit, tl


@jit
def _store(out, result, weight, token, head, heads, held, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    columns = tl.arange(0, HEAD_PAD)
    result = result / tl.where(weight == 0.0, 1.0, weight)[:, None]
    target = out + ((token * heads + head) * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=held[:, None] & (columns < HEAD_DIM)[None, :])


@partial(jit, unspecialized=("offsets", "lengths", "tables", "table_stride"))
def fixed_decode_kernel(
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
    PART_KEYS: tl.constexpr,
    PARTS: tl.constexpr,
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
    start = tl.maximum(part_start(part, PART_KEYS, PARTS), lowest // BLOCK_N * BLOCK_N)
    end = tl.minimum(part_start(part + 1, PART_KEYS, PARTS), total)
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
    first_part = part_at(lowest, PART_KEYS, PARTS)
    last_part = part_at(tl.maximum(total - 1, 0), PART_KEYS, PARTS)
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
            joined_maximum, joined_weight, joined_result = join_parts(
                joined_maximum, joined_weight, joined_result, part_maximum, part_weight, part_result
            )
    if sinks is not None:
        joined_maximum, joined_weight, joined_result = join_sink(
            joined_maximum, joined_weight, joined_result, sinks, head, held
        )
    _store(out, joined_result, joined_weight, token, head, heads, held, HEAD_DIM, HEAD_PAD)
