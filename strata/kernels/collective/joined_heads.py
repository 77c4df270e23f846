"""Kernels around the message by which ranks that divide keys join what they have found: it is packed, and joined."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.triton_import import jit, tl

_WARPS = 1


@partial(jit, unspecialized=("tokens",))
def pack_heads_kernel(mixed, sums, packed, tokens, OWN: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """Programs [tokens, heads]: of mixed [tokens, heads, DIM] and sums [tokens, heads] the part of each rank, which has
    OWN heads, into packed [ranks, tokens, OWN * DIM + OWN]: averages first, then the logarithms."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    column = tl.arange(0, DIM_PAD)
    inside = column < DIM
    row = packed + (head // OWN * tokens.to(tl.int64) + token) * (OWN * DIM + OWN)
    found = tl.load(mixed + (token * heads + head) * DIM + column, mask=inside)
    tl.store(row + head % OWN * DIM + column, found, mask=inside)
    tl.store(row + OWN * DIM + head % OWN, tl.load(sums + token * heads + head))


@partial(jit, unspecialized=("tokens",))
def join_heads_kernel(
    packed,
    out,
    tokens,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    OWN: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    """Programs [tokens, OWN]: packed [RANKS, tokens, OWN * DIM + OWN], of each rank what it found; out [tokens, OWN,
    DIM], the averages over all keys, summed in the order of the ranks; zeros where no rank saw a key."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width = OWN * DIM + OWN
    rank = tl.arange(0, RANKS_PAD)
    logarithms = packed + (rank * tokens.to(tl.int64) + token) * width + OWN * DIM + head
    largest = tl.max(tl.load(logarithms, mask=rank < RANKS, other=float("-inf")), 0)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    column = tl.arange(0, DIM_PAD)
    total = 0.0
    result = tl.zeros((DIM_PAD,), tl.float32)
    for part in range(RANKS):
        row = packed + (part * tokens.to(tl.int64) + token) * width
        share = tl.exp2((tl.load(row + OWN * DIM + head) - shift) * 1.4426950408889634)
        total += share
        result += share * tl.load(row + head * DIM + column, mask=column < DIM, other=0.0)
    result = result / tl.where(total == 0.0, 1.0, total)
    target = out + (token * tl.num_programs(1) + head) * DIM + column
    tl.store(target, result.to(out.dtype.element_ty), mask=column < DIM)


def pack_heads(mixed: Tensor, sums: Tensor, ranks: int) -> Tensor:
    """What goes to each rank: mixed [tokens, heads, dim], sums [tokens, heads], float32 -> [ranks, tokens, width]."""
    tokens, heads, dim = mixed.shape
    own = heads // ranks
    packed = mixed.new_empty((ranks, tokens, own * (dim + 1)))
    pack_heads_kernel[(tokens, heads)](
        mixed, sums, packed, tokens, OWN=own, DIM=dim, DIM_PAD=next_power_of_2(dim), num_warps=_WARPS
    )
    return packed


def unpack_heads(packed: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """What has come from each rank, as `pack_heads` made it there -> [tokens, heads of this rank, dim] in `dtype`."""
    ranks, tokens, width = packed.shape
    own = width // (dim + 1)
    out = packed.new_empty((tokens, own, dim), dtype=dtype)
    join_heads_kernel[(tokens, own)](
        packed,
        out,
        tokens,
        RANKS=ranks,
        RANKS_PAD=next_power_of_2(ranks),
        OWN=own,
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        num_warps=_WARPS,
    )
    return out
