"""The Triton kernel of prompts that begin in a step: attention over keys and values that were made of the step's rows.

The softmax is computed in one pass (FlashAttention-2, Dao 2023). A score is the sum of two products: of what a head's
keys have of their own, and of the end of all heads' keys, which is read where the rows of latents have it.
"""

from __future__ import annotations

from functools import partial

import torch

from strata.kernels.attention.softmax_triton import queries_of_tile, with_queries
from strata.kernels.attention.varlen_triton import Tile
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.latent.forms import Dims
from strata.kernels.triton_import import jit, tl


@jit
def _load(source, held, WIDTH: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """Columns [0, WIDTH) of rows that begin at `source` [rows]: [rows, PAD]. Zeros where MASKED and not held."""
    column = tl.arange(0, PAD)[None, :]
    place = source[:, None] + column
    if WIDTH < PAD:
        return tl.load(place, mask=held[:, None] & (column < WIDTH), other=0.0)
    if MASKED:
        return tl.load(place, mask=held[:, None], other=0.0)
    return tl.load(place)


@jit
def _attend(front, back, query, maximum, weight, result, start, new, keys, tails, scale, made_token, row_token,
            MASKED: tl.constexpr, NOPE: tl.constexpr, NOPE_PAD: tl.constexpr, ROPE: tl.constexpr,
            ROPE_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """The keys at positions [start, start + BLOCK_N) below `new` join the running softmax of a tile of queries.

    front [queries, NOPE_PAD], back [queries, ROPE_PAD]; query [queries]: the position of each. keys, tails: those of
    position 0. maximum, weight [queries] and result [queries, VALUE_PAD] float32: the largest score so far (in powers
    of two), the sum of the weights, the weighted sum of the values. MASKED: some queries do not see all of the block.
    """
    ahead = tl.arange(0, BLOCK_N)
    position = start + ahead
    there = position < new
    # In a long prompt 32 bits do not count the elements in front of a block, only those in it.
    source = keys + start * made_token.to(tl.int64) + ahead * made_token
    own = _load(source, there, NOPE, NOPE_PAD, MASKED)
    values = _load(source + NOPE, there, VALUE, VALUE_PAD, MASKED)
    source = tails + start * row_token.to(tl.int64) + ahead * row_token
    shared = _load(source, there, ROPE, ROPE_PAD, MASKED)
    scores = tl.dot(front, tl.trans(own), input_precision="ieee")
    scores = tl.dot(back, tl.trans(shared), scores, input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(there[None, :] & (position[None, :] <= query[:, None]), scores, float("-inf"))
    # No maximum stays infinite: a query sees the first key of the first block.
    largest = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - largest[:, None])
    shrink = tl.exp2(maximum - largest)
    weight = weight * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None], input_precision="ieee")
    return largest, weight, result


@partial(jit, unspecialized=("starts", "offsets", "bounds", "lengths", "sequences"))
def expanded_prompt_kernel(
    q,
    made,
    rows,
    out,
    starts,
    offsets,
    bounds,
    lengths,
    sequences,
    scale,
    rank,
    q_token,
    q_head,
    made_token,
    row_token,
    out_token,
    out_head,
    NOPE: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs [heads, tokens // BLOCK_M + sequences]: a tile of neighbouring queries of one head and sequence.

    Of sequence s the queries in rows [starts[s], offsets[s + 1]), if these are all of its tokens, lengths[s]; with
    length 0, that of padding, their results are zeros, and with more tokens than these the program ends at once.
    bounds: only sequences [bounds[0], bounds[1]) have queries; None: any may. made: [tokens, heads, NOPE + VALUE], a
    head's keys and then its values; rows: [tokens, rank + ROPE], of latents and the end of all heads' keys.
    """
    head = tl.program_id(0).to(tl.int64)
    # The tiles that see most keys come last in a sequence and start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    low, beyond, skipped = with_queries(starts, bounds, sequences)
    if bounds is not None and tile >= (tl.load(offsets + beyond) - skipped) // BLOCK_M + beyond - low:
        return
    sequence, first, new, query_start = queries_of_tile(tile, starts, offsets, low, beyond, skipped, BLOCK_M)
    length = tl.load(lengths + sequence)
    if query_start >= new or length > new:
        return

    query = query_start + tl.arange(0, BLOCK_M)
    held = query < new
    token = (first + query).to(tl.int64)
    source = q + token * q_token + head * q_head
    front = _load(source, held, NOPE, NOPE_PAD, True)
    back = _load(source + NOPE, held, ROPE, ROPE_PAD, True)
    keys = made + first.to(tl.int64) * made_token + head * (NOPE + VALUE)
    tails = rows + first.to(tl.int64) * row_token + rank
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, VALUE_PAD), tl.float32)
    end = tl.minimum(length, query_start + BLOCK_M)
    # Blocks that every query sees whole need no mask.
    whole = tl.minimum(length, query_start + 1) // BLOCK_N * BLOCK_N
    for start in range(0, whole, BLOCK_N):
        maximum, weight, result = _attend(
            front, back, query, maximum, weight, result, start, new, keys, tails, scale, made_token, row_token,
            False, NOPE, NOPE_PAD, ROPE, ROPE_PAD, VALUE, VALUE_PAD, BLOCK_N,
        )  # fmt: skip
    for start in range(whole, end, BLOCK_N):
        maximum, weight, result = _attend(
            front, back, query, maximum, weight, result, start, new, keys, tails, scale, made_token, row_token,
            True, NOPE, NOPE_PAD, ROPE, ROPE_PAD, VALUE, VALUE_PAD, BLOCK_N,
        )  # fmt: skip
    result = result / tl.where(weight == 0.0, 1.0, weight)[:, None]
    column = tl.arange(0, VALUE_PAD)[None, :]
    target = out + (token * out_token + head * out_head)[:, None] + column
    tl.store(target, result.to(out.dtype.element_ty), mask=held[:, None] & (column < VALUE))


def expanded_tile(dtype: torch.dtype) -> Tile:
    """By what a Hopper multiprocessor holds; others were not timed yet (`benchmarks.latent.prompts --tiles`)."""
    return Tile(32, 16, 8, 1) if dtype == torch.float32 else Tile(128, 64, 8, 2)


def expanded_constants(dims: Dims) -> dict[str, int]:
    """A matrix instruction sums over 16 columns at least."""
    sizes = {"NOPE": dims.nope, "ROPE": dims.rope, "VALUE": dims.value}
    return sizes | {f"{name}_PAD": max(16, next_power_of_2(size)) for name, size in sizes.items()}
