"""The Triton kernels of absorbed latent attention: rows are keys and, their first columns, values of all heads.

A row is loaded once for all heads of a tile. The softmax is computed in one pass (FlashAttention-2, Dao 2023); of a
decode the rows of a sequence are divided among programs (Flash-Decoding, Dao et al. 2023), and a second kernel joins
what they found.

`head_product`: a product for each head, in tiles of one shape: a row of the result has the same bits in any company.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.attention.softmax_triton import queries_of_tile, with_queries
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.triton_import import jit, tl


@jit
def _load_queries(latent, q, token, head, held, latent_token, latent_head, q_token, q_head, nope,
                  RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr):  # fmt: skip
    """Rows [rows, RANK_PAD] and [rows, ROPE_PAD] of queries: in the space of the latent, and with a position."""
    column = tl.arange(0, RANK_PAD)[None, :]
    source = latent + (token * latent_token + head * latent_head)[:, None] + column
    front = tl.load(source, mask=held[:, None] & (column < RANK), other=0.0)
    column = tl.arange(0, ROPE_PAD)[None, :]
    source = q + (token * q_token + head * q_head)[:, None] + nope + column
    return front, tl.load(source, mask=held[:, None] & (column < ROPE), other=0.0)


@jit
def _row_offsets(table, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr):
    """Where the rows at positions [start, start + BLOCK_N) begin among the pages; past `end` the last one again."""
    position = tl.maximum(tl.minimum(start + tl.arange(0, BLOCK_N), end - 1), 0)
    page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
    return (page * PAGE_SIZE + position % PAGE_SIZE) * WIDTH


@jit
def _load_rows(rows, offsets, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr):
    """Of the rows at `offsets` [BLOCK_N]: the latents [BLOCK_N, RANK_PAD], and what is behind [BLOCK_N, ROPE_PAD]."""
    column = tl.arange(0, RANK_PAD)[None, :]
    source = rows + offsets[:, None]
    latents = tl.load(source + column) if RANK_PAD == RANK else tl.load(source + column, mask=column < RANK, other=0.0)
    column = tl.arange(0, ROPE_PAD)[None, :]
    source += RANK
    tails = tl.load(source + column) if ROPE_PAD == ROPE else tl.load(source + column, mask=column < ROPE, other=0.0)
    return latents, tails


@jit
def _attend(front, back, at, maximum, weight, result, latents, tails, start, end, scale, BLOCK_N: tl.constexpr):
    """The rows at positions [start, start + BLOCK_N) below `end` join the running softmax of a tile of queries.

    at [queries]: the last position that each sees. maximum, weight [queries] and result [queries, RANK_PAD] float32:
    the largest score so far (in powers of two), the sum of the weights, the weighted sum of the latents. A block of
    which a query sees nothing leaves its state as it is, bit for bit.
    """
    position = start + tl.arange(0, BLOCK_N)
    scores = tl.dot(front, tl.trans(latents), input_precision="ieee")
    scores = tl.dot(back, tl.trans(tails), scores, input_precision="ieee") * scale
    scores = tl.where((position < end)[None, :] & (position[None, :] <= at[:, None]), scores, float("-inf"))
    largest = tl.maximum(maximum, tl.max(scores, 1))
    # A query that has seen nothing yet has the maximum -inf, and -inf minus itself is not a number.
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(maximum - shift)
    weight = weight * shrink + tl.sum(weights, 1)
    result = tl.dot(weights.to(latents.dtype), latents, result * shrink[:, None], input_precision="ieee")
    return largest, weight, result


@partial(
    jit, unspecialized=("starts", "offsets", "bounds", "lengths", "tables", "sequences", "table_stride", "key_rank")
)
def latent_prompt_kernel(
    latent,
    q,
    rows,
    out,
    starts,
    offsets,
    bounds,
    lengths,
    tables,
    sequences,
    scale,
    nope,
    latent_token,
    latent_head,
    q_token,
    q_head,
    table_stride,
    out_token,
    out_head,
    sums,
    key_rank,
    KEY_RANKS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CONTINUED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs [blocks of heads * (tokens // TILE_QUERIES + sequences)], those of a tile side by side: neighbouring
    queries of one sequence. In one dimension, because others have 65,535 at most.

    Of sequence s the queries in rows [starts[s], offsets[s + 1]), the last of its tokens. bounds: only sequences
    [bounds[0], bounds[1]) have any; None: any may. CONTINUED: only sequences with tokens in front of these are run.
    latent: the queries in the space of the latent; out: the weighted sums of latents.
    A query's sum goes over blocks that begin at multiples of BLOCK_N, so its bits depend on its sequence alone.
    sums: [tokens, HEADS] float32, takes the logarithm of each query's sum of exponentials; None: nobody wants it.
    KEY_RANKS: so many divide the rows of a sequence, and the pages here hold those of number `key_rank` (`DcpShard`).
    """
    # The tiles that see most come last in a sequence and start first.
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEAD_BLOCKS
    TILE_QUERIES: tl.constexpr = BLOCK_M // BLOCK_HEADS
    low, beyond, skipped = with_queries(starts, bounds, sequences)
    if bounds is not None and tile >= (tl.load(offsets + beyond) - skipped) // TILE_QUERIES + beyond - low:
        return
    sequence, first, new, query_start = queries_of_tile(tile, starts, offsets, low, beyond, skipped, TILE_QUERIES)
    if query_start >= new:
        return
    total = tl.load(lengths + sequence)
    if CONTINUED and total <= new:
        return

    row = tl.arange(0, BLOCK_M)
    query = query_start + row // BLOCK_HEADS
    # In a long step 32 bits do not count the elements in front of the last head.
    head = (tl.program_id(0) % HEAD_BLOCKS * BLOCK_HEADS + row % BLOCK_HEADS).to(tl.int64)
    held = (query < new) & (head < HEADS)
    token = (first + query).to(tl.int64)
    front, back = _load_queries(
        latent, q, token, head, held, latent_token, latent_head, q_token, q_head, nope, RANK, RANK_PAD, ROPE, ROPE_PAD
    )
    at = total - new + query
    end = tl.minimum(total, total - new + query_start + TILE_QUERIES)
    if KEY_RANKS > 1:  # positions become places among the rows here: that of a query is the last row that it sees
        at = (at + KEY_RANKS - key_rank) // KEY_RANKS - 1
        end = (end + KEY_RANKS - 1 - key_rank) // KEY_RANKS
    table = tables + sequence * table_stride
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, RANK_PAD), tl.float32)
    # Looked up a block ahead: loads that wait for a lookup could not be pipelined.
    offsets = _row_offsets(table, 0, end, PAGE_SIZE, BLOCK_N, RANK + ROPE)
    for start in range(0, end, BLOCK_N):
        latents, tails = _load_rows(rows, offsets, RANK, RANK_PAD, ROPE, ROPE_PAD)
        offsets = _row_offsets(table, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N, RANK + ROPE)
        maximum, weight, result = _attend(
            front, back, at, maximum, weight, result, latents, tails, start, end, scale, BLOCK_N
        )
    if sums is not None:
        tl.store(sums + token * HEADS + head, (maximum + tl.log2(weight)) * 0.6931471805599453, mask=held)
    result = result / tl.where(weight == 0.0, 1.0, weight)[:, None]
    column = tl.arange(0, RANK_PAD)[None, :]
    target = out + (token * out_token + head * out_head)[:, None] + column
    tl.store(target, result.to(out.dtype.element_ty), mask=held[:, None] & (column < RANK))


@jit
def _rows_here(length, key_rank, KEY_RANKS: tl.constexpr):
    """How many rows of a sequence the pages here hold."""
    return (length + KEY_RANKS - 1 - key_rank) // KEY_RANKS if KEY_RANKS > 1 else length


@jit
def _division(length, splits, min_rows, BLOCK_N: tl.constexpr):
    """Rows of a split, whole blocks, and how many splits a sequence has: at least `min_rows` each."""
    size = tl.maximum(tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N, min_rows)
    return size, tl.cdiv(length, size)


@partial(jit, unspecialized=("lengths", "tables", "table_stride", "min_rows", "key_rank"))
def latent_decode_kernel(
    latent,
    q,
    rows,
    results,
    scales,
    lengths,
    tables,
    scale,
    nope,
    latent_token,
    latent_head,
    q_token,
    q_head,
    table_stride,
    min_rows,
    key_rank,
    KEY_RANKS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs [blocks of heads, sequences, splits]: the query of a sequence, token of its number, over part of its
    rows.

    results [sequences, splits, HEADS, RANK], scales [sequences, splits, HEADS] float32: weighted means of latents and
    the logarithms (to the base two) of their weights. min_rows: of a split, a multiple of BLOCK_N. key_rank,
    KEY_RANKS: as for `latent_prompt_kernel`.
    """
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    length = _rows_here(tl.load(lengths + sequence), key_rank, KEY_RANKS)
    size, used = _division(length, splits, min_rows, BLOCK_N)
    if split >= used:
        return
    head = (tl.program_id(0) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    held = head < HEADS
    front, back = _load_queries(
        latent, q, sequence, head, held, latent_token, latent_head, q_token, q_head, nope,
        RANK, RANK_PAD, ROPE, ROPE_PAD,
    )  # fmt: skip
    end = tl.minimum(length, (split + 1) * size)
    at = tl.full((BLOCK_HEADS,), 0, tl.int32) + end
    table = tables + sequence * table_stride
    maximum = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_HEADS,), tl.float32)
    result = tl.zeros((BLOCK_HEADS, RANK_PAD), tl.float32)
    # Looked up a block ahead: loads that wait for a lookup could not be pipelined.
    offsets = _row_offsets(table, split * size, end, PAGE_SIZE, BLOCK_N, RANK + ROPE)
    for start in range(split * size, end, BLOCK_N):
        latents, tails = _load_rows(rows, offsets, RANK, RANK_PAD, ROPE, ROPE_PAD)
        offsets = _row_offsets(table, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N, RANK + ROPE)
        maximum, weight, result = _attend(
            front, back, at, maximum, weight, result, latents, tails, start, end, scale, BLOCK_N
        )
    part = (sequence * splits + split) * HEADS + head
    column = tl.arange(0, RANK_PAD)[None, :]
    tl.store(results + part[:, None] * RANK + column, result / weight[:, None], mask=held[:, None] & (column < RANK))
    tl.store(scales + part, maximum + tl.log2(weight), mask=held)


@partial(jit, unspecialized=("lengths", "splits", "min_rows", "key_rank"))
def latent_join_kernel(
    results,
    scales,
    out,
    lengths,
    splits,
    min_rows,
    out_token,
    out_head,
    sums,
    key_rank,
    KEY_RANKS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Programs [HEADS, sequences]: the weighted mean of a sequence's splits, in their order; zeros if it has none.
    sums, key_rank, KEY_RANKS: as for `latent_prompt_kernel`."""
    head = tl.program_id(0).to(tl.int64)
    sequence = tl.program_id(1).to(tl.int64)
    length = _rows_here(tl.load(lengths + sequence), key_rank, KEY_RANKS)
    _, used = _division(length, splits, min_rows, BLOCK_N)
    column = tl.arange(0, RANK_PAD)
    maximum = float("-inf")
    weight = 0.0
    result = tl.zeros((RANK_PAD,), tl.float32)
    for split in range(used):
        part = (sequence * splits + split) * HEADS + head
        each = tl.load(scales + part)
        largest = tl.maximum(maximum, each)
        share = tl.exp2(each - largest)
        shrink = tl.exp2(maximum - largest)
        weight = weight * shrink + share
        result = result * shrink + share * tl.load(results + part * RANK + column, mask=column < RANK, other=0.0)
        maximum = largest
    if sums is not None:
        tl.store(sums + sequence * HEADS + head, (maximum + tl.log2(weight)) * 0.6931471805599453)
    result = result / tl.where(weight == 0.0, 1.0, weight)
    tl.store(out + sequence * out_token + head * out_head + column, result.to(out.dtype.element_ty), mask=column < RANK)


@partial(jit, unspecialized=("tokens",))
def head_product_kernel(
    x,
    weight,
    result,
    tokens,
    out,
    width,
    x_token,
    x_head,
    weight_head,
    weight_out,
    weight_width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Programs [blocks of tokens, blocks of columns, heads]; result [tokens, heads, out]."""
    head = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    k = tl.arange(0, BLOCK_K)
    left = x + row.to(tl.int64) * x_token + head * x_head + k[None, :]
    right = weight + head.to(tl.int64) * weight_head + column * weight_out + k[:, None] * weight_width
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        inside = k < width - start
        one = tl.load(left, mask=(row < tokens) & inside[None, :], other=0.0)
        other = tl.load(right, mask=(column < out) & inside[:, None], other=0.0)
        total = tl.dot(one, other, total, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K * weight_width
    target = result + (row.to(tl.int64) * tl.num_programs(2) + head) * out + column
    tl.store(target, total.to(result.dtype.element_ty), mask=(row < tokens) & (column < out))


_TILE, _OPTIONS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, {"num_warps": 4, "num_stages": 3}


def head_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, heads, width], weight [heads, out, width] of any strides -> [tokens, heads, out]."""
    (tokens, heads, width), out = x.shape, weight.shape[1]
    result = torch.empty((tokens, heads, out), dtype=x.dtype, device=x.device)
    if result.numel():
        head_product_kernel[(ceil_div(tokens, _TILE["BLOCK_M"]), ceil_div(out, _TILE["BLOCK_N"]), heads)](
            x, weight, result, tokens, out, width, *x.stride()[:2], *weight.stride(), **_TILE, **_OPTIONS
        )
    return result
