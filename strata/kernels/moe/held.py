"""Expert parallelism where every rank has all tokens: a rank computes its own experts' part of the weighted sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.linear.packed.frozen import frozen_call
from strata.kernels.moe.calls import HeldExpertsCall
from strata.kernels.moe.combine import weighted_sums
from strata.kernels.moe.experts import (
    expected_experts,
    experts,
    library_kernels,
    library_scratch,
    library_supports,
    ours_take,
    take_rows,
    tile_kernels,
    tiles_scratch,
)
from strata.kernels.moe.grouped import grouped_product
from strata.kernels.moe.held_order import held_numbers, held_order, sorts_by_counting
from strata.kernels.moe.packed_experts import FROZEN, WAYS
from strata.kernels.op import operation
from strata.kernels.quant.packed import PackedWeight
from strata.kernels.triton_import import HAS_TRITON


def _cost(call: HeldExpertsCall[Any], *, workload: Workload) -> Cost:
    x, weights, chosen, gate_up, down, _, slots, placement, _ = call
    held, hidden, width = down.shape
    choices = chosen.numel()
    # Choices fall evenly on all slots. Of a choice: three products, the activation's five operations, the weighted sum.
    flops = round(choices * held / slots * (6 * width * hidden + 5 * width + 2 * hidden))
    used = expected_experts(len(chosen), choices, slots) * held / slots
    read = round(used * (gate_up.nbytes + down.nbytes) / held)
    where = 0 if placement is None else choices * placement.itemsize
    return Cost(flops, x.nbytes + weights.nbytes + chosen.nbytes + where + read, x.nbytes, read)


# Of copies, which rank computes a row follows from the row's place; the sum over the ranks is rowwise all the same.
@operation(_cost, operands=HeldExpertsCall, rowwise=True, packable=(3, 4), mixture=True)
def held_experts(call: HeldExpertsCall[Any]) -> Tensor:
    """A rank's part of `experts`: the sum over those of a token's experts that this rank computes; zeros for none.

    The sum over all ranks is what `experts` gives. How many choices are this rank's stays on the device. Returns
    [tokens, hidden] in x's dtype.
    """
    return _by_numbers(experts.reference, call)


def _by_numbers(run: Callable[..., Any], call: HeldExpertsCall[Any]) -> Tensor:
    """By `experts`, which has to be told on the host how many choices are this rank's."""
    x, weights, chosen, gate_up, down, first, _, placement, slot_mapping = call
    numbers = held_numbers(chosen, first, down.shape[0], placement, slot_mapping)
    result: Tensor = run(x, weights, numbers, gate_up, down, int((numbers >= 0).sum()))
    return result


def _in_place(call: HeldExpertsCall[Any]) -> bool:
    """Which rank rounds a part of the sum may not depend on where in the batch a token stands."""
    return call.placement is None or call.placement.shape[1] == 1


# Functions by a name, of which torch.fx makes the code of a graph.
@held_experts.implement("an expert at a time", "cpu")
def _cpu(call: HeldExpertsCall[Tensor]) -> Tensor:
    return _by_numbers(experts.bind("cpu"), call)


@held_experts.implement("fixed tiles", "cpu", invariant=True, supports=_in_place)
def _fixed(call: HeldExpertsCall[Tensor]) -> Tensor:
    return _by_numbers(experts.bind("cpu", deterministic=True), call)


@held_experts.implement("fixed tiles, unpacked", "cpu", invariant=True, supports=_in_place, packed=True)
def _fixed_unpacked(call: HeldExpertsCall[PackedWeight]) -> Tensor:
    return _by_numbers(experts.bind("cpu", deterministic=True, packed=True), call)


def _is_long(call: HeldExpertsCall[Tensor]) -> bool:
    """What the library's grouped product takes (see `experts`), of so many choices that the rows of others, which are
    copied all the same, cost less than its larger tiles save.
    """
    return sorts_by_counting(call.chosen) and library_supports(call) and _fits(call)


def _fits(call: HeldExpertsCall[Tensor]) -> bool:
    x, weights, chosen, gate_up, down = call[:5]
    ours = ours_take(x, gate_up, down)
    return ours and weights.dtype == torch.float32 and weights.is_contiguous() and chosen.is_contiguous()


def grouped_held(call: HeldExpertsCall[Tensor]) -> Tensor:
    """By the library's grouped product, which leaves rows behind the last end unwritten; nobody reads them."""
    x, weights, chosen, gate_up, down, first, _, placement, slot_mapping = call
    order = held_order(chosen, first, len(down), placement, slot_mapping)
    rows = take_rows(x, order)
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=order.ends).chunk(2, -1)
    rows = torch._grouped_mm(silu_mul(gate, up), down.transpose(1, 2), offs=order.ends)
    return weighted_sums(rows, order.inverse, weights, full=False)


def held_by_tiles(call: HeldExpertsCall[Tensor]) -> Tensor:
    """By products of our own: one fetches the rows of this rank's choices itself and applies the gate, the other
    follows, and neither does anything for what other ranks compute.
    """
    x, weights, chosen, gate_up, down, first, _, placement, slot_mapping = call
    if chosen.numel() == 0:
        return torch.zeros_like(x)
    order = held_order(chosen, first, len(down), placement, slot_mapping)
    inner = grouped_product(x, gate_up, order.ends, source=order.source, per_token=chosen.shape[1], gated=True)
    return weighted_sums(grouped_product(inner, down, order.ends), order.inverse, weights, full=False)


if HAS_TRITON:
    held_experts.implement("grouped", "cuda", supports=_is_long, kernels=library_kernels, scratch=library_scratch)(
        grouped_held
    )
    held_experts.implement("triton", "cuda", supports=_fits, kernels=tile_kernels, scratch=tiles_scratch)(held_by_tiles)


def _packed(rows_of: Callable[..., Tensor], call: HeldExpertsCall[PackedWeight]) -> Tensor:
    x, weights, chosen, _, down, first, _, placement, slot_mapping = call
    if chosen.numel() == 0:
        return torch.zeros_like(x)
    order = held_order(chosen, first, down.shape[0], placement, slot_mapping)
    return weighted_sums(rows_of(call, order), order.inverse, weights, full=False)


for _way in WAYS:
    held_experts.implement(
        _way.name, "cuda", supports=_way.supports, kernels=_way.kernels, packed=True, scratch=_way.scratch
    )(partial(_packed, _way.rows))


@held_experts.implement(FROZEN, "cuda", packed=True)
def _frozen(call: HeldExpertsCall[PackedWeight]) -> Tensor:
    return frozen_call(held_experts.bind("cuda"), *call)
