"""Which of a rank's experts each choice of a token goes to, and the order that sorts those choices by expert."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.kernels.choose import thresholds
from strata.kernels.compile_case import CompileCase
from strata.kernels.device_limits import implementations_for
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.moe.counting_order import COUNTING_KERNELS, counting_order, held_number
from strata.kernels.moe.order import Order
from strata.kernels.triton_import import HAS_TRITON, jit, tl


def held_numbers(
    chosen: Tensor, first: int, held: int, placement: Tensor | None, slot_mapping: Tensor | None = None
) -> Tensor:
    """For each choice the expert's number among those that this rank holds, -1 if another rank computes it, or none.

    chosen, first, placement and slot_mapping as in `held_experts`; held: how many slots this rank has. Returns int64 or
    int32 like `chosen` (int32 with a placement), [tokens, per_token].
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


# What varies from step to step and rank to rank must not compile anew.
@partial(jit, unspecialized=("choices", "first", "held", "per_token", "period"))
def held_order_kernel(
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
    number = held_number(chosen, placement, slot_mapping, choice, there, first, held, per_token, period, PLACED, PADDED)
    # Sorted by expert, then as they stand: one number tells which of two comes first.
    rank = tl.where(places, number * choices + choice, (expert + 1) * choices)
    before = tl.zeros((BLOCK, WIDTH), dtype=tl.int32)
    for start in range(0, choices, WIDTH):
        other = start + tl.arange(0, WIDTH)
        is_one = other < choices
        numbers = held_number(
            chosen, placement, slot_mapping, other, is_one, first, held, per_token, period, PLACED, PADDED
        )
        before += (numbers * choices + other)[None, :] < rank[:, None]
    place = tl.sum(before, axis=1)
    if places:
        tl.store(source + place, choice.to(tl.int64), mask=there)
        tl.store(inverse + choice, tl.where(number < held, place, -1).to(tl.int64), mask=there)
    else:
        tl.store(ends + expert, place, mask=expert < held)


_BLOCK, _WIDTH, _WARPS = 8, 128, 4


def held_order(
    chosen: Tensor, first: int, held: int, placement: Tensor | None = None, slot_mapping: Tensor | None = None
) -> Order:
    """The order of the choices that go to this rank's experts; behind them, as they stand, those that do not.

    chosen, first, placement and slot_mapping as in `held_experts`; held: how many slots this rank has. With 0 and the
    number of all experts, the order of choices that may be -1. On CUDA in one launch, of more than
    `Thresholds.sorted_choices` in three. `Order.inverse` is -1 for what other ranks compute, or none. Nothing waits for
    the device.
    """
    if not HAS_TRITON or implementations_for(chosen.device) != "cuda":
        return Order.of(held_numbers(chosen, first, held, placement, slot_mapping), held, empty=True)
    make = counting_order if sorts_by_counting(chosen) else _by_rank
    return make(chosen.contiguous(), first, held, placement, slot_mapping)


def sorts_by_counting(chosen: Tensor) -> bool:
    """Whether there are so many choices that counting them in blocks is less work than each before each."""
    return chosen.numel() > thresholds(chosen.device).sorted_choices


def order_kernels(chosen: Tensor) -> tuple[Any, ...]:
    """What `held_order` launches on CUDA."""
    return COUNTING_KERNELS if sorts_by_counting(chosen) else (held_order_kernel,)


def _by_rank(chosen: Tensor, first: int, held: int, placement: Tensor | None, slot_mapping: Tensor | None) -> Order:
    choices = chosen.numel()
    source = torch.empty(choices, dtype=torch.int64, device=chosen.device)
    inverse = torch.empty(chosen.shape, dtype=torch.int64, device=chosen.device)
    ends = torch.empty(held, dtype=torch.int32, device=chosen.device)
    held_order_kernel[(ceil_div(choices, _BLOCK) + ceil_div(held, _BLOCK),)](
        chosen,
        chosen if placement is None else placement,
        chosen if slot_mapping is None else slot_mapping,
        source,
        inverse,
        ends,
        choices,
        first,
        held,
        chosen.shape[1],
        1 if placement is None else placement.shape[1],
        PLACED=placement is not None,
        PADDED=slot_mapping is not None,
        BLOCK=_BLOCK,
        WIDTH=_WIDTH,
        num_warps=_WARPS,
    )
    return Order(source, inverse, ends)


def compile_cases() -> list[CompileCase]:
    signature = dict.fromkeys(("source", "inverse"), "*i64:16") | {"ends": "*i32:16"}
    signature |= dict.fromkeys(("choices", "first", "held", "per_token", "period"), "i32")
    constants = {"BLOCK": _BLOCK, "WIDTH": _WIDTH}
    cases = []
    for placed, padded in ((False, False), (True, False), (False, True), (True, True)):
        kinds = {"chosen": "*i64:16", "placement": "*i32:16" if placed else "*i64:16"}
        kinds |= {"slot_mapping": "*i32:16" if padded else "*i64:16"}
        name = f"order of a rank's choices{', placed by a table' * placed}{', with padding' * padded}"
        known = {"PLACED": placed, "PADDED": padded, **constants}
        cases.append(CompileCase(name, held_order_kernel, kinds | signature, known, _WARPS, 2))
    return cases
