"""Which of a rank's experts each choice of a token goes to, and the order that sorts those choices by expert.

Few choices are sorted in one launch, each counting those before it; many by a counting sort in three, in which equal
ones stay as they stand.

`Order`: rows of a mixture's tokens, sorted by the expert that they go to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.choose import thresholds
from strata.kernels.device_limits import implementations_for
from strata.kernels.grid_sizes import ceil_div, next_power_of_2
from strata.kernels.triton_import import HAS_TRITON, jit, tl


@dataclass(frozen=True)
class Order:
    """Rows, one for each token and expert of it, sorted by expert, those of one in the order of tokens; some of a
    token's slots may have no row.

    source: [rows] which slot, counted token by token, each row is of. inverse: [tokens, per_token], which row a
    slot has, -1 for none. ends: [experts] int32, where the rows of each expert end.
    """

    source: Tensor
    inverse: Tensor
    ends: Tensor

    @staticmethod
    def of(chosen: Tensor, count: int, *, empty: bool = False) -> Order:
        """chosen: [tokens, per_token] below `count`. empty: whether it may be -1, for a slot without a row; the order
        then has to be told the number of rows (`with_rows`). Nothing waits for the device.
        """
        numbers = chosen.flatten()
        # Slots without a row come last.
        expert, source = (numbers.where(numbers >= 0, count) if empty else numbers).sort(stable=True)
        inverse = torch.empty_like(source).scatter_(0, source, torch.arange(len(source), device=source.device))
        if empty:
            inverse.masked_fill_(numbers < 0, -1)
        bounds = torch.arange(count, dtype=expert.dtype, device=expert.device)
        ends = torch.searchsorted(expert, bounds, right=True, out_int32=True)
        return Order(source, inverse.view(chosen.shape), ends)

    def with_rows(self, rows: int | None) -> Order:
        """The same of as many rows as there are, which only the device knew; None: every slot has one."""
        return replace(self, source=self.source[:rows])


def local_numbers(
    chosen: Tensor, first: int, held: int, placement: Tensor | None, slot_mapping: Tensor | None = None
) -> Tensor:
    """For each choice the expert's number among those that this rank holds, -1 if another rank computes it, or none.

    chosen, first, placement and slot_mapping as in `local_experts`; held: how many slots this rank has. Returns int64
    or int32 like `chosen` (int32 with a placement), [tokens, per_token].
    """
    slots = chosen
    if placement is not None:
        turn = torch.arange(len(chosen), device=chosen.device) % placement.shape[1]
        slots = placement[chosen.long(), turn[:, None]]
    local = slots - first
    elsewhere = (local < 0) | (local >= held)
    if slot_mapping is not None:
        elsewhere |= slot_mapping[:, None] < 0
    return local.masked_fill_(elsewhere, -1)


@jit
def number_here(tables, sizes, choice, there, PLACED: tl.constexpr, PADDED: tl.constexpr):
    """Of choices their experts' numbers among those held; `held` where another rank computes, or there is none.

    tables: chosen, placement and slot mapping. sizes: the first slot of this rank, held, per_token, period.
    """
    chosen, placement, slot_mapping = tables
    first, held, per_token, period = sizes
    if PADDED:
        there = there & (tl.load(slot_mapping + choice // per_token, mask=there, other=-1) >= 0)
    slot = tl.load(chosen + choice, mask=there, other=0)
    if PLACED:
        slot = tl.load(placement + slot * period + choice // per_token % period, mask=there, other=0)
    number = slot.to(tl.int32) - first
    return tl.where(there & (number >= 0) & (number < held), number, held)


# What varies from step to step and rank to rank must not compile anew.
@partial(jit, unspecialized=("choices", "first", "held", "per_token", "period"))
def local_order_kernel(
    chosen,
    placement,
    slot_mapping,
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
    """Programs [choices / BLOCK + held / BLOCK]: the first find the place of BLOCK choices each, by counting the
    choices that come before; the others where the rows of BLOCK experts end, by counting the same way.
    """
    block = tl.program_id(0)
    blocks = tl.cdiv(choices, BLOCK)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = choice - blocks * BLOCK
    places = block < blocks
    there = places & (choice < choices)
    tables, sizes = (chosen, placement, slot_mapping), (first, held, per_token, period)
    number = number_here(tables, sizes, choice, there, PLACED, PADDED)
    # Sorted by expert, then as they stand: one number tells which of two comes first.
    rank = tl.where(places, number * choices + choice, (expert + 1) * choices)
    before = tl.zeros((BLOCK, WIDTH), dtype=tl.int32)
    for start in range(0, choices, WIDTH):
        other = start + tl.arange(0, WIDTH)
        is_one = other < choices
        numbers = number_here(tables, sizes, other, is_one, PLACED, PADDED)
        before += (numbers * choices + other)[None, :] < rank[:, None]
    place = tl.sum(before, axis=1)
    if places:
        tl.store(source + place, choice.to(tl.int64), mask=there)
        tl.store(inverse + choice, tl.where(number < held, place, -1).to(tl.int64), mask=there)
    else:
        tl.store(ends + expert, place, mask=expert < held)


@partial(jit, unspecialized=("choices", "first", "held", "per_token", "period"))
def local_order_counts_kernel(
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
    tables, sizes = (chosen, placement, slot_mapping), (first, held, per_token, period)
    number = number_here(tables, sizes, choice, there, PLACED, PADDED)
    # What lies beyond the last choice is counted in a bin that nobody reads.
    found = tl.histogram(tl.where(there, number, BINS - 1), BINS)
    bin = tl.arange(0, BINS)
    tl.store(counts + bin * tl.cdiv(choices, BLOCK) + block, found, mask=bin <= held)


@partial(jit, unspecialized=("counts", "blocks"))
def local_order_sums_kernel(counts, totals, blocks, BLOCK: tl.constexpr):
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
def local_order_places_kernel(
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
    tables, sizes = (chosen, placement, slot_mapping), (first, held, per_token, period)
    number = number_here(tables, sizes, choice, there, PLACED, PADDED)
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
            numbers = number_here(tables, sizes, other, is_one, PLACED, PADDED)
            before += (numbers[None, :] == number[:, None]) & (other[None, :] < choice[:, None])
    place = tl.sum(before, axis=1)
    if places:
        place += tl.load(counts + number * blocks + block, mask=there, other=0)
        tl.store(source + place, choice.to(tl.int64), mask=there)
        tl.store(inverse + choice, tl.where(number < held, place, -1).to(tl.int64), mask=there)
    else:
        tl.store(ends + expert, place, mask=expert < held)


COUNTING_KERNELS = (local_order_counts_kernel, local_order_sums_kernel, local_order_places_kernel)
# Choices of a program and what it compares them with at a time: of few choices, and of many.
_BLOCK, _WIDTH = 8, 128
_COUNTED_BLOCK, _COUNTED_WIDTH, _SUMMED = 128, 32, 1024


def local_order(
    chosen: Tensor, first: int, held: int, placement: Tensor | None = None, slot_mapping: Tensor | None = None
) -> Order:
    """The order of the choices that go to this rank's experts; behind them, as they stand, those that do not.

    chosen, first, placement and slot_mapping as in `local_experts`; held: how many slots this rank has. With 0 and the
    number of all experts, the order of choices that may be -1. On CUDA in one launch, of more than
    `Thresholds.sorted_choices` in three. `Order.inverse` is -1 for what other ranks compute, or none. Nothing waits for
    the device.
    """
    if not HAS_TRITON or implementations_for(chosen.device) != "cuda":
        return Order.of(local_numbers(chosen, first, held, placement, slot_mapping), held, empty=True)
    counting = sorts_by_counting(chosen)
    return sort_choices(chosen.contiguous(), first, held, placement, slot_mapping, counting=counting)


def sorts_by_counting(chosen: Tensor) -> bool:
    """Whether there are so many choices that counting them in blocks is less work than each before each."""
    return chosen.numel() > thresholds(chosen.device).sorted_choices


def order_kernels(chosen: Tensor) -> tuple[Any, ...]:
    """What `local_order` launches on CUDA."""
    return COUNTING_KERNELS if sorts_by_counting(chosen) else (local_order_kernel,)


def sort_choices(
    chosen: Tensor, first: int, held: int, placement: Tensor | None, slot_mapping: Tensor | None, *, counting: bool
) -> Order:
    """As `local_order` on CUDA, of choices, a placement and a slot mapping that are contiguous."""
    choices, device = chosen.numel(), chosen.device
    source = torch.empty(choices, dtype=torch.int64, device=device)
    inverse = torch.empty(chosen.shape, dtype=torch.int64, device=device)
    ends = torch.empty(held, dtype=torch.int32, device=device)
    tables = (chosen, chosen if placement is None else placement, chosen if slot_mapping is None else slot_mapping)
    sizes = (choices, first, held, chosen.shape[1], 1 if placement is None else placement.shape[1])
    block = _COUNTED_BLOCK if counting else _BLOCK
    ways: dict[str, Any] = {"PLACED": placement is not None, "PADDED": slot_mapping is not None, "BLOCK": block}
    blocks = ceil_div(choices, block)
    grid = (blocks + ceil_div(held, block),)
    if not counting:
        local_order_kernel[grid](*tables, source, inverse, ends, *sizes, **ways, WIDTH=_WIDTH, num_warps=4)
        return Order(source, inverse, ends)
    counts = torch.empty((held + 1, blocks), dtype=torch.int32, device=device)
    totals = torch.empty(held + 1, dtype=torch.int32, device=device)
    # A bin for each expert, one for none, and one that is not read; at least as many as a warp has threads.
    bins = max(32, next_power_of_2(held + 2))
    local_order_counts_kernel[(blocks,)](*tables, counts, *sizes, **ways, BINS=bins, num_warps=4)
    local_order_sums_kernel[(held + 1,)](counts, totals, blocks, BLOCK=_SUMMED, num_warps=4)
    local_order_places_kernel[grid](
        *tables, counts, totals, source, inverse, ends, *sizes, **ways, WIDTH=_COUNTED_WIDTH, num_warps=8
    )
    return Order(source, inverse, ends)
