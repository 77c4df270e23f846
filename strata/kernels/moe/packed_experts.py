"""The two products of a mixture's experts with packed weights on CUDA: what runs them, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strata.kernels.choose import thresholds
from strata.kernels.linear.packed.few_rows import ordered
from strata.kernels.moe.calls import AnyExpertsCall
from strata.kernels.moe.combine import combine_kernel
from strata.kernels.moe.held_order import order_kernels
from strata.kernels.moe.order import Order
from strata.kernels.moe.packed_grouped import is_readable, packed_grouped_product
from strata.kernels.moe.packed_grouped_kernels import packed_grouped_kernel
from strata.kernels.moe.rounded_grouped import rounded_grouped_kernel, rounded_grouped_product, rounded_takes
from strata.kernels.op import ATEN
from strata.kernels.quant.packed import PackedWeight
from strata.kernels.quant.round_rows import round_rows, round_rows_kernel
from strata.kernels.triton_import import HAS_TRITON

# Of all operations that multiply by experts, the first but of held ones; what the last does, `frozen_call` tells.
CHOICES, ROUNDED, CONVERTED, FROZEN = "packed, choices", "packed, rounded", "packed, tiles", "of frozen weights"

_round = round_rows.bind("cuda")


def _summed(weights: Tensor | None, chosen: Tensor) -> bool:
    """Whether a kernel sums what a token's experts make of it."""
    return chosen.is_contiguous() and (weights is None or (weights.dtype == torch.float32 and weights.is_contiguous()))


def _rounded_support(call: AnyExpertsCall[PackedWeight]) -> bool:
    x, weights, chosen, gate_up, down = call[:5]
    many = chosen.numel() > thresholds(x.device).converted_rows * down.shape[0]
    return (
        many
        and rounded_takes(x.dtype, gate_up)
        and rounded_takes(x.dtype, down)
        and x.stride(-1) == 1
        and _summed(weights, chosen)
    )


def rounded_rows(call: AnyExpertsCall[PackedWeight], order: Order) -> Tensor:
    """As `converted_rows`, of x that is rounded and so is what is gated."""
    x, _, chosen, gate_up, down = call[:5]
    first, last = call.biases
    values, scales = _round(ordered(x, gate_up), gate_up.kind, gate_up.columns, gate_up.input_scale)
    inner = rounded_grouped_product(
        values,
        scales,
        gate_up,
        order.ends,
        x.dtype,
        source=order.source,
        per_token=chosen.shape[1],
        gated=True,
        bias=first,
        clamp=call.bounds,
    )
    values, scales = _round(ordered(inner, down), down.kind, down.columns, down.input_scale)
    return rounded_grouped_product(values, scales, down, order.ends, x.dtype, bias=last)


def _converted_support(call: AnyExpertsCall[PackedWeight]) -> bool:
    x, weights, chosen, gate_up, down = call[:5]
    # What lies between the products is contiguous.
    inner = torch.empty((1, down.shape[2]), dtype=x.dtype, device="meta")
    return is_readable(x, gate_up) and is_readable(inner, down) and _summed(weights, chosen)


def converted_rows(call: AnyExpertsCall[PackedWeight], order: Order) -> Tensor:
    """What experts make of the rows of an order, [rows, hidden], x not rounded: one product fetches rows and gates, one
    follows."""
    x, _, chosen, gate_up, down = call[:5]
    first, last = call.biases
    inner = packed_grouped_product(
        ordered(x, gate_up),
        gate_up,
        order.ends,
        source=order.source,
        per_token=chosen.shape[1],
        gated=True,
        bias=first,
        clamp=call.bounds,
    )
    return packed_grouped_product(ordered(inner, down), down, order.ends, bias=last)


def _kernels(*each: Any) -> Callable[[AnyExpertsCall[PackedWeight]], tuple[Any, ...]]:
    """each: what either product launches, behind what orders columns."""

    def of(call: AnyExpertsCall[PackedWeight]) -> tuple[Any, ...]:
        first, last = (each if one.order is None else (ATEN, *each) for one in (call.gate_up, call.down))
        return *order_kernels(call.chosen), *first, *last, combine_kernel

    return of


def _converted_scratch(call: AnyExpertsCall[PackedWeight]) -> int:
    """Bytes of the order of rows, of what is gated and of what comes out of it, beside the sums."""
    x, _, chosen, _, down = call[:5]
    count, hidden, width = down.shape
    inner, outer = (chosen.numel() * columns * x.element_size() for columns in (width, hidden))
    return 16 * chosen.numel() + 4 * count + outer + max(0, inner - x.nbytes)


def _rounded_scratch(call: AnyExpertsCall[PackedWeight]) -> int:
    """As `_converted_scratch`, and rows in 8 bits with their scales, of x and of what is gated, which stay as long."""
    x, _, chosen, gate_up, down = call[:5]
    of_x, of_inner = (
        columns + 4 * (-(-columns // weight.columns) if weight.columns else 1)
        for columns, weight in ((x.shape[1], gate_up), (down.shape[2], down))
    )
    return _converted_scratch(call) + len(chosen) * of_x + chosen.numel() * of_inner


class Way(NamedTuple):
    """How packed experts run: as an `Implementation`, but `rows` is `converted_rows` or the like."""

    name: str
    rows: Callable[..., Tensor]
    supports: Callable[..., bool]
    kernels: Callable[..., tuple[Any, ...]]
    scratch: Callable[..., int]


WAYS: tuple[Way, ...] = (
    (
        Way(
            ROUNDED,
            rounded_rows,
            _rounded_support,
            _kernels(round_rows_kernel, rounded_grouped_kernel),
            _rounded_scratch,
        ),
        Way(CONVERTED, converted_rows, _converted_support, _kernels(packed_grouped_kernel), _converted_scratch),
    )
    if HAS_TRITON
    else ()
)
