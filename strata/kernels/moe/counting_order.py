"""The order of many choices by expert: a counting sort in three launches, in which equal ones stay as they stand."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from strata.kernels.compile_case import CompileCase
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.moe.order import Order
from strata.kernels.triton_import import jit, tl


@jit
def held_number(
    chosen,
    placement,
    slot_mapping,
    choice,
    there,
    first,
    held,
    per_token,
    period,
    PLACED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Of choices their experts' numbers among those held; `held` where another rank computes, or there is none."""
    if PADDED:
        there = there & (tl.load(slot_mapping + choice // per_token, mask=there, other=-1) >= 0)
    slot = tl.load(chosen + choice, mask=there, other=0)
    if PLACED:
        slot = tl.load(placement + slot * period + choice // per_token % period, mask=there, other=0)
    number = slot.to(tl.int32) - first
    return tl.where(there & (number >= 0) & (number < held), number, held)


# What varies from step to step and rank to rank must not compile anew.
@partial(jit, unspecialized=("choices", "first", "held", "per_token", "period"))
def held_order_counts_kernel(
    chosen,
    placement,
    slot_mapping,
    counts,
    choices,
    first,
    held,
    per_token,
    period,
    PLACED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Programs [choices / BLOCK]: how many of BLOCK choices go to each expert; counts [held + 1, choices / BLOCK], the
    last of those that go to none. BINS: a power of two above held + 1."""
    block = tl.program_id(0)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    there = choice < choices
    number = held_number(chosen, placement, slot_mapping, choice, there, first, held, per_token, period, PLACED, PADDED)
    # What lies beyond the last choice is counted in a bin that nobody reads.
    found = tl.histogram(tl.where(there, number, BINS - 1), BINS)
    bin = tl.arange(0, BINS)
    tl.store(counts + bin * tl.cdiv(choices, BLOCK) + block, found, mask=bin <= held)


@partial(jit, unspecialized=("counts", "blocks"))
def held_order_sums_kernel(counts, totals, blocks, BLOCK: tl.constexpr):
    """Programs [held + 1]: an expert's counts become those of the blocks before, and totals [held + 1] their sum."""
    expert = tl.program_id(0)
    total = 0
    for start in range(0, blocks, BLOCK):
        block = start + tl.arange(0, BLOCK)
        count = tl.load(counts + expert * blocks + block, mask=block < blocks, other=0)
        tl.store(counts + expert * blocks + block, total + tl.cumsum(count, 0) - count, mask=block < blocks)
        total += tl.sum(count, 0)
    tl.store(totals + expert, total)


@partial(jit, unspecialized=("choices", "first", "held", "per_token", "period"))
def held_order_places_kernel(
    chosen,
    placement,
    slot_mapping,
    counts,
    totals,
    source,
    inverse,
    ends,
    choices,
    first,
    held,
    per_token,
    period,
    PLACED: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Programs [choices / BLOCK + held / BLOCK]: the first find the places of BLOCK choices each, behind those of lower
    experts, of the blocks before, and of the choices before in the block; the others where the rows of BLOCK experts
    end.
    """
    block = tl.program_id(0)
    blocks = tl.cdiv(choices, BLOCK)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = choice - blocks * BLOCK
    places = block < blocks
    there = places & (choice < choices)
    number = held_number(chosen, placement, slot_mapping, choice, there, first, held, per_token, period, PLACED, PADDED)
    below = tl.where(places, number, expert + 1)
    before = tl.zeros((BLOCK, WIDTH), dtype=tl.int32)
    for start in range(0, held, WIDTH):
        other = start + tl.arange(0, WIDTH)
        total = tl.load(totals + other, mask=other < held, other=0)
        before += tl.where(other[None, :] < below[:, None], total[None, :], 0)
    if places:
        for start in range(0, BLOCK, WIDTH):
            other = block * BLOCK + start + tl.arange(0, WIDTH)
            is_one = other < choices
            numbers = held_number(
                chosen, placement, slot_mapping, other, is_one, first, held, per_token, period, PLACED, PADDED
            )
            before += (numbers[None, :] == number[:, None]) & (other[None, :] < choice[:, None])
    place = tl.sum(before, axis=1)
    if places:
        place += tl.load(counts + number * blocks + block, mask=there, other=0)
        tl.store(source + place, choice.to(tl.int64), mask=there)
        tl.store(inverse + choice, tl.where(number < held, place, -1).to(tl.int64), mask=there)
    else:
        tl.store(ends + expert, place, mask=expert < held)


COUNTING_KERNELS = (held_order_counts_kernel, held_order_sums_kernel, held_order_places_kernel)
_BLOCK, _WIDTH, _SUMMED = 128, 32, 1024
_WARPS, _PLACES_WARPS = 4, 8


def counting_order(
    chosen: Tensor, first: int, held: int, placement: Tensor | None, slot_mapping: Tensor | None
) -> Order:
    """As `held_order`, of choices, a placement and a slot mapping that are contiguous."""
    choices = chosen.numel()
    blocks = ceil_div(choices, _BLOCK)
    counts, totals, ends = (
        torch.empty(size, dtype=torch.int32, device=chosen.device) for size in ((held + 1, blocks), held + 1, held)
    )
    source = torch.empty(choices, dtype=torch.int64, device=chosen.device)
    inverse = torch.empty(chosen.shape, dtype=torch.int64, device=chosen.device)
    tables = (chosen, chosen if placement is None else placement, chosen if slot_mapping is None else slot_mapping)
    sizes = (choices, first, held, chosen.shape[1], 1 if placement is None else placement.shape[1])
    ways = {"PLACED": placement is not None, "PADDED": slot_mapping is not None, "BLOCK": _BLOCK}
    held_order_counts_kernel[(blocks,)](*tables, counts, *sizes, **ways, BINS=_bins(held), num_warps=_WARPS)
    held_order_sums_kernel[(held + 1,)](counts, totals, blocks, BLOCK=_SUMMED, num_warps=_WARPS)
    held_order_places_kernel[(blocks + ceil_div(held, _BLOCK),)](
        *tables, counts, totals, source, inverse, ends, *sizes, **ways, WIDTH=_WIDTH, num_warps=_PLACES_WARPS
    )
    return Order(source, inverse, ends)


def _bins(held: int) -> int:
    """One for each expert, one for none, and one that is not read; at least as many as a warp has threads."""
    return max(32, next_power_of_2(held + 2))


def compile_cases() -> list[CompileCase]:
    pointers = dict.fromkeys(("source", "inverse", "chosen"), "*i64:16")
    pointers |= dict.fromkeys(("ends", "totals"), "*i32:16")
    numbers = dict.fromkeys(("choices", "first", "held", "per_token", "period", "blocks"), "i32")
    cases = []
    for placed, padded in ((False, False), (True, True)):
        tables = {"placement": "*i32:16" if placed else "*i64:16", "slot_mapping": "*i32:16" if padded else "*i64:16"}
        signature = pointers | tables | numbers | {"counts": "*i32:16"}
        known: dict[str, object] = {"PLACED": placed, "PADDED": padded, "BLOCK": _BLOCK}
        name = f"counting sort of choices{', placed by a table and with padding' * placed}"
        places = known | {"WIDTH": _WIDTH}
        cases.append(CompileCase(f"{name}, places", held_order_places_kernel, signature, places, _PLACES_WARPS, 2))
        counts = known | {"BINS": _bins(8 if placed else 512)}
        cases.append(CompileCase(f"{name}, counts", held_order_counts_kernel, signature, counts, _WARPS, 2))
    signature = {"counts": "*i32", "totals": "*i32:16", "blocks": "i32"}
    sums = CompileCase("counting sort, sums", held_order_sums_kernel, signature, {"BLOCK": _SUMMED}, _WARPS, 2)
    return [*cases, sums]
