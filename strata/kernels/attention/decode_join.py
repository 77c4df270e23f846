"""What joins the splits of a decoding sequence: the last of their programs that ends, or a kernel behind them.

One program goes through its splits in turns, each of which waits for loads from the L2 cache: with 4 query heads to a
KV head 46 splits took 20 us. The kernel has a program for each query head, which loads all at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from strata.kernels.attention.decode_tile import MAX_SPLITS
from strata.kernels.triton_import import gdc_launch_dependents, gdc_wait, jit, tl


@jit
def key_splits(length, rank, splits, min_keys, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, RANKS: tl.constexpr):
    """How the keys of a sequence are divided.

    Returns: its tokens of this rank; these, one at least; the first that is seen; the first of its block, with which
    splits begin; how many each split has; how many splits have some.
    """
    if RANKS > 1:
        length = (length + RANKS - 1 - rank) // RANKS
    total = tl.maximum(length, 1)  # a padding row has a token, and no page for it
    lowest = tl.maximum(total - WINDOW, 0) if WINDOW > 0 else 0
    begin = lowest // BLOCK_N * BLOCK_N
    # A split has the least keys, or as many whole blocks as let the sequence fit into the splits there are.
    size = tl.maximum(tl.cdiv(tl.cdiv(total - begin, splits), BLOCK_N) * BLOCK_N, min_keys)
    return length, total, lowest, begin, size, tl.cdiv(total - begin, size)


@jit
def join_splits(
    results,
    scales,
    used,
    heads,
    head,
    held,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    JOINED: tl.constexpr,
):
    """The weighted mean of the first `used` splits of heads [GROUP_PAD], JOINED at a time, always in their order; and
    the logarithm (to the base two) of their weight."""
    columns = tl.arange(0, HEAD_PAD)
    maximum = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    weight = tl.zeros((GROUP_PAD,), tl.float32)
    result = tl.zeros((GROUP_PAD, HEAD_PAD), tl.float32)
    for start in tl.range(0, used, JOINED, num_stages=1):
        split = start + tl.arange(0, JOINED)
        there = (split < used)[:, None] & held[None, :]
        source = split[:, None] * heads + head[None, :]
        # Past the nearest cache, which does not see what other processors write.
        each = tl.load(scales + source, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            results + source[:, :, None] * HEAD_DIM + columns[None, None, :],
            mask=there[:, :, None] & (columns < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        largest = tl.maximum(maximum, tl.max(each, 0))
        share = tl.exp2(each - largest[None, :])
        shrink = tl.exp2(maximum - largest)
        weight = weight * shrink + tl.sum(share, 0)
        result = result * shrink[:, None] + tl.sum(part * share[:, :, None], 0)
        maximum = largest
    return result / weight[:, None], maximum + tl.log2(weight)


@partial(jit, unspecialized=("lengths", "min_keys", "rank", "splits"))
def join_decodes_kernel(
    results,
    scales,
    out,
    sums,
    lengths,
    rank,
    min_keys,
    splits,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs [heads, sequences], behind `decode_attention_kernel` of the same arguments, which has left the sequences
    of a single split finished. SPLITS: a power of two, not below `splits`."""
    head, heads = tl.program_id(0), tl.num_programs(0)
    sequence = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + sequence)
    _, _, _, _, _, used = key_splits(length, rank, splits, min_keys, WINDOW, BLOCK_N, RANKS)
    if EARLY:
        # The product behind may load its weights beside attention, as without this kernel. It waits for all programs
        # here, and each of them for attention: so each has to, whether it joins anything or not.
        gdc_launch_dependents()
        gdc_wait()
    if used == 1:
        return
    split, columns = tl.arange(0, SPLITS), tl.arange(0, HEAD_PAD)
    source = (sequence * splits + split) * heads + head
    there, held = split < used, columns < HEAD_DIM
    each = tl.load(scales + source, mask=there, other=float("-inf"))
    part = tl.load(
        results + source[:, None] * HEAD_DIM + columns[None, :], mask=there[:, None] & held[None, :], other=0.0
    )
    largest = tl.max(each, 0)
    share = tl.exp2(each - largest)
    weight = tl.sum(share, 0)
    joined = tl.sum(part * share[:, None], 0) / weight
    place = sequence * heads + head
    tl.store(out + place * HEAD_DIM + columns, joined.to(out.dtype.element_ty), mask=held)
    if sums is not None:
        tl.store(sums + place, (largest + tl.log2(weight)) * 0.6931471805599453)


def join_constants(head_dim: int) -> dict[str, Any]:
    """Of `join_decodes_kernel`: a thread has 64 of the values that are joined, or 32."""
    return {"SPLITS": MAX_SPLITS, "num_warps": 8 if head_dim > 128 else 4}
