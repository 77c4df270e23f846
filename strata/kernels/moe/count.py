"""How often each expert is chosen, counted on the device in the step itself: what placement of experts goes by."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


def _cost(chosen: Tensor, slot_mapping: Tensor, totals: Tensor, layer: int, *, workload: Workload) -> Cost:
    counted = chosen.numel() * totals.itemsize  # of each choice one number is read and written
    return Cost(chosen.numel(), chosen.nbytes + slot_mapping.nbytes + counted, counted)


@operation(_cost, mutates=("totals",), rowwise=True)
def count_choices(chosen: Tensor, slot_mapping: Tensor, totals: Tensor, layer: int) -> Tensor:
    """`chosen` as it is; adds to `totals` how often each expert of a layer was chosen.

    chosen: [tokens, per_token] int64, as `route` returns it. slot_mapping: [tokens] int32 as in `PagedKV`; tokens with
    -1 are padding and not counted, those that other ranks keep are. totals: [layers, experts] int64, contiguous.
    """
    is_token = (slot_mapping != -1)[:, None].expand_as(chosen)
    totals[layer].index_add_(0, chosen.flatten(), is_token.flatten().to(totals.dtype))
    return chosen


# Sums of integers are the same in any order.
count_choices.by_definition("cpu", invariant=True)

_BLOCK = 256


@partial(jit, unspecialized=("slot_mapping", "totals", "choices", "per_token"))
def count_choices_kernel(chosen, slot_mapping, totals, choices, per_token, BLOCK: tl.constexpr):
    """Programs [choices / BLOCK]. totals: of one layer."""
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = choice < choices
    place = tl.load(slot_mapping + choice // per_token, mask=there, other=-1)
    expert = tl.load(chosen + choice, mask=there, other=0)
    tl.atomic_add(totals + expert, tl.full((BLOCK,), 1, tl.int64), mask=there & (place != -1), sem="relaxed")


def _triton(chosen: Tensor, slot_mapping: Tensor, totals: Tensor, layer: int) -> Tensor:
    choices = chosen.numel()
    if choices:
        count_choices_kernel[(ceil_div(choices, _BLOCK),)](
            chosen, slot_mapping, totals[layer], choices, chosen.shape[1], BLOCK=_BLOCK
        )
    return chosen


count_choices.in_triton(_triton, invariant=True, kernels=(count_choices_kernel,))
