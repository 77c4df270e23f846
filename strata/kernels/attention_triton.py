"""Triton kernels of attention: for mixed batches, and for decoding with the keys of a sequence split among programs.

The softmax is computed in one pass (FlashAttention-2, Dao 2023), the keys of a decoding sequence are divided into
splits whose results are joined (Flash-Decoding, Dao et al. 2023), and the query heads that share a KV head are rows of
one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from strata.kernels.compile_case import CompileCase
from strata.kernels.triton_import import jit, tl, triton


@jit
def key_slots(positions, held, first, table, PAGE_SIZE: tl.constexpr):
    """Where the keys at `positions` lie, in tokens from the start of k and v; PAGE_SIZE 0: packed, from `first` on."""
    if PAGE_SIZE == 0:
        return (first + positions).to(tl.int64)
    page = tl.load(table + positions // PAGE_SIZE, mask=held, other=0).to(tl.int64)
    return page * PAGE_SIZE + positions % PAGE_SIZE


@jit
def _attend(
    queries,
    at,
    maximum,
    weight,
    result,
    start,
    total,
    k,
    v,
    first,
    table,
    scale,
    k_stride,
    v_stride,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One block of keys [start, start + BLOCK_N) joins the running softmax of a tile of queries.

    queries [rows, HEAD_PAD]; at [rows]: position of each; maximum, weight [rows] and result [rows, HEAD_PAD] float32:
    the largest score so far (in powers of two), the sum of the weights, the weighted sum of the values. A block of
    which a row sees nothing leaves the row's state as it is, bit for bit.
    """
    positions = start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, HEAD_PAD)
    held = positions < total
    slots = key_slots(positions, held, first, table, PAGE_SIZE)
    k_mask = (columns < HEAD_DIM)[:, None]
    v_mask = (columns < HEAD_DIM)[None, :]
    if MASKED:
        k_mask = k_mask & held[None, :]
        v_mask = v_mask & held[:, None]
    keys = tl.load(k + slots[None, :] * k_stride + columns[:, None], mask=k_mask, other=0.0)
    values = tl.load(v + slots[:, None] * v_stride + columns[None, :], mask=v_mask, other=0.0)
    scores = tl.dot(queries, keys, input_precision="ieee") * scale
    if MASKED:
        visible = positions[None, :] <= at[:, None]
        if WINDOW > 0:
            visible = visible & (positions[None, :] > at[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, 1))
    # A row that has seen nothing yet has the maximum -inf, and -inf minus itself is not a number.
    shift = tl.where(largest == float("-inf"), 0.0, largest) if MASKED else largest
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(maximum - shift)
    weight = weight * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
    return largest, weight, result


@partial(jit, unspecialized=("starts", "offsets", "lengths", "tables", "sequences", "table_stride"))
def attention_kernel(
    q,
    k,
    v,
    out,
    starts,
    offsets,
    lengths,
    tables,
    sequences,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs [kv_heads, tokens // (BLOCK_M // GROUP) + sequences]: a tile of queries of one sequence each.

    Of sequence s the queries in rows [starts[s], offsets[s + 1]), the last of its tokens. PAGE_SIZE 0: k and v are
    packed like q from starts on, and lengths and tables are not read.
    """
    kv_head = tl.program_id(0)
    # The tiles that see most keys come last in a sequence and start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    TILE_QUERIES: tl.constexpr = BLOCK_M // GROUP
    # Sequence s starts with tile starts[s] // TILE_QUERIES + s: find the last that starts at this tile or before.
    sequence = 0
    beyond = sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if tl.load(starts + middle) // TILE_QUERIES + middle <= tile:
            sequence = middle
        else:
            beyond = middle
    first = tl.load(starts + sequence)
    new = tl.load(offsets + sequence + 1) - first
    query_start = (tile - first // TILE_QUERIES - sequence) * TILE_QUERIES
    if query_start >= new:
        return
    total = new if PAGE_SIZE == 0 else tl.load(lengths + sequence)

    row = tl.arange(0, BLOCK_M)
    query = query_start + row // GROUP
    held = (query < new) & (row < TILE_QUERIES * GROUP)
    head = kv_head * GROUP + row % GROUP
    columns = tl.arange(0, HEAD_PAD)
    mask = held[:, None] & (columns < HEAD_DIM)[None, :]
    token = (first + query).to(tl.int64)
    queries = tl.load(q + (token * q_stride + head * HEAD_DIM)[:, None] + columns[None, :], mask=mask, other=0.0)

    at = total - new + query
    lowest = total - new + query_start
    end = tl.minimum(total, lowest + TILE_QUERIES)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(lowest + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    k += kv_head * HEAD_DIM
    v += kv_head * HEAD_DIM
    table = tables + sequence * table_stride

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, HEAD_PAD), tl.float32)
    if WINDOW == 0:
        # Blocks that every row sees whole need no mask.
        whole = (lowest + 1) // BLOCK_N * BLOCK_N
        for block in range(0, whole, BLOCK_N):
            maximum, weight, result = _attend(
                queries, at, maximum, weight, result, block, total, k, v, first, table, scale, k_stride, v_stride,
                False, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip
        start = tl.maximum(whole, 0)
    for block in range(start, end, BLOCK_N):
        maximum, weight, result = _attend(
            queries, at, maximum, weight, result, block, total, k, v, first, table, scale, k_stride, v_stride,
            True, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
    result = result / tl.where(weight == 0.0, 1.0, weight)[:, None]
    HEADS = tl.num_programs(0) * GROUP
    target = out + ((token * HEADS + head) * HEAD_DIM)[:, None] + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)


@partial(jit, unspecialized=("offsets", "lengths", "tables", "table_stride"))
def decode_kernel(
    q,
    k,
    v,
    partial_results,
    partial_scales,
    offsets,
    lengths,
    tables,
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
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs [kv_heads, splits, sequences]: one query over the keys [split * SPLIT, (split + 1) * SPLIT).

    Leaves the normalized result [sequences, splits, heads, HEAD_DIM] and the logarithm (to the base two) of its weight
    [sequences, splits, heads] of every split that the query sees; the others stay unwritten.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(offsets + sequence)
    total = tl.load(lengths + sequence)
    start = split * SPLIT
    end = tl.minimum(total, start + SPLIT)
    if WINDOW > 0:
        start = tl.maximum(start, tl.maximum(total - WINDOW, 0) // BLOCK_N * BLOCK_N)
    if start >= end:
        return
    row = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, HEAD_PAD)
    held = row < GROUP
    mask = held[:, None] & (columns < HEAD_DIM)[None, :]
    head = kv_head * GROUP + row
    source = q + first.to(tl.int64) * q_stride + (head * HEAD_DIM)[:, None] + columns[None, :]
    queries = tl.load(source, mask=mask, other=0.0)
    at = tl.full((BLOCK_M,), 0, tl.int32) + total - 1
    k += kv_head * HEAD_DIM
    v += kv_head * HEAD_DIM
    table = tables + sequence * table_stride

    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, HEAD_PAD), tl.float32)
    for block in range(start, end, BLOCK_N):
        maximum, weight, result = _attend(
            queries, at, maximum, weight, result, block, total, k, v, first, table, scale, k_stride, v_stride,
            True, WINDOW, HEAD_DIM, HEAD_PAD, PAGE_SIZE, BLOCK_N,
        )  # fmt: skip
    HEADS = tl.num_programs(0) * GROUP
    target = (sequence.to(tl.int64) * tl.num_programs(1) + split) * HEADS + head
    tl.store(partial_results + (target * HEAD_DIM)[:, None] + columns[None, :], result / weight[:, None], mask=mask)
    tl.store(partial_scales + target, maximum + tl.log2(weight), mask=held)


@partial(jit, unspecialized=("offsets", "lengths", "splits"))
def join_kernel(
    partial_results,
    partial_scales,
    out,
    offsets,
    lengths,
    splits,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Programs [heads, sequences]: the weighted mean of the splits that `decode_kernel` left."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    heads = tl.num_programs(0)
    first = tl.load(offsets + sequence)
    if tl.load(offsets + sequence + 1) == first:
        return
    total = tl.load(lengths + sequence)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(total - WINDOW, 0) // SPLIT
    end = tl.cdiv(total, SPLIT)
    columns = tl.arange(0, HEAD_PAD)
    base = sequence.to(tl.int64) * splits
    every = tl.arange(0, MOST_SPLITS)
    used = (every >= begin) & (every < end)
    scales = tl.load(partial_scales + (base + every) * heads + head, mask=used, other=float("-inf"))
    maximum = tl.max(scales, 0)
    weight = tl.zeros((BLOCK_SPLITS,), tl.float32)
    result = tl.zeros((HEAD_PAD,), tl.float32)
    for block in range(begin, end, BLOCK_SPLITS):
        split = block + tl.arange(0, BLOCK_SPLITS)
        source = (base + split) * heads + head
        share = tl.exp2(tl.load(partial_scales + source, mask=split < end, other=float("-inf")) - maximum)
        mask = (split < end)[:, None] & (columns < HEAD_DIM)[None, :]
        part = tl.load(partial_results + (source * HEAD_DIM)[:, None] + columns[None, :], mask=mask, other=0.0)
        weight += share
        result += tl.sum(part * share[:, None], 0)
    sum_of_weights = tl.sum(weight, 0)
    result = result / tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
    target = out + (first.to(tl.int64) * heads + head) * HEAD_DIM + columns
    tl.store(target, result.to(out.dtype.element_ty), mask=columns < HEAD_DIM)


@dataclass(frozen=True)
class Tile:
    """rows: query rows (queries times the heads of a group); keys: of a block; warps and stages of the pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


# How many splits a sequence may have before they grow.
MOST_SPLITS = 64


def split_tokens(sequences: int, most: int) -> int:
    """Tokens of a split where a sequence has at most `most`: finer where few sequences would leave processors idle."""
    finest = 64 if sequences <= 4 else 128 if sequences <= 16 else 256
    size: int = max(finest, triton.next_power_of_2(triton.cdiv(most, MOST_SPLITS)))
    return size


def mixed_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(32, 16, 8, 2)
    return Tile(128, 64, 8, 3) if head_dim <= 128 else Tile(128, 32, 8, 2)


def head_pad(head_dim: int) -> int:
    """The columns of a tile: a power of two, and at least the 16 that a matrix instruction sums over."""
    padded: int = max(16, triton.next_power_of_2(head_dim))
    return padded


def decode_tile(group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    rows = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(rows, 16, 8, 2)
    return Tile(rows, 64, 4, 3) if head_dim <= 128 else Tile(rows, 32, 4, 3)


def compile_cases() -> list[CompileCase]:
    bf16, fp32 = torch.bfloat16, torch.float32
    cases = _cases(bf16, head_dim=128, group=4, page_size=16, window=0)
    cases += _cases(bf16, head_dim=256, group=8, page_size=16, window=0)[:2]
    cases += _cases(bf16, head_dim=80, group=7, page_size=0, window=4096)
    cases += _cases(fp32, head_dim=128, group=4, page_size=16, window=0)[:2]
    return cases


def _cases(dtype: torch.dtype, head_dim: int, group: int, page_size: int, window: int) -> list[CompileCase]:
    """Mixed attention; decoding and joining where there are pages."""
    kind = "fp32" if dtype == torch.float32 else "bf16"
    tensors = dict.fromkeys(("q", "k", "v", "out"), f"*{kind}:16")
    tensors |= dict.fromkeys(("partial_results", "partial_scales"), "*fp32:16")
    indices = dict.fromkeys(("starts", "offsets", "lengths", "tables"), "*i32")
    numbers = dict.fromkeys(("q_stride", "k_stride", "v_stride"), "i32:16")
    numbers |= dict.fromkeys(("table_stride", "sequences", "splits"), "i32") | {"scale": "fp32"}
    types = tensors | indices | numbers

    def case(name: str, kernel: Any, constants: dict[str, object], tile: Tile, instruction: str) -> CompileCase:
        signature = {argument: types[argument] for argument in kernel.arg_names if argument in types}
        name = f"{name} {kind} head_dim {head_dim} group {group} page_size {page_size} window {window}"
        instructions = () if dtype == torch.float32 or not instruction else (instruction,)
        return CompileCase(name, kernel, signature, constants, tile.warps, tile.stages, instructions)

    shape: dict[str, object] = {"HEAD_DIM": head_dim, "HEAD_PAD": head_pad(head_dim), "WINDOW": window}
    common: dict[str, object] = {**shape, "GROUP": group, "PAGE_SIZE": page_size}
    tile = mixed_tile(head_dim, dtype)
    constants = {**common, "BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
    cases = [case("attention", attention_kernel, constants, tile, "wgmma.mma_async")]
    if page_size:
        tile = decode_tile(group, head_dim, dtype)
        constants = {**common, "SPLIT": split_tokens(64, 4096), "BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
        cases.append(case("decode", decode_kernel, constants, tile, "mma.sync"))
        constants = {**shape, "SPLIT": split_tokens(64, 4096), "MOST_SPLITS": MOST_SPLITS, "BLOCK_SPLITS": 8}
        cases.append(case("join", join_kernel, constants, Tile(1, 8, 2, 3), ""))
    return cases
