"""The two products of a mixture's experts with packed weights on CUDA: what runs them, and when."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from strata.kernels.activation.clamped_swiglu import Clamp
from strata.kernels.linear.packed.few_rows import ordered
from strata.kernels.moe.combine import combine_kernel
from strata.kernels.moe.held_order import order_kernels
from strata.kernels.moe.order import Order
from strata.kernels.moe.packed_grouped import is_readable, packed_grouped_product
from strata.kernels.moe.packed_grouped_kernels import packed_grouped_kernel
from strata.kernels.op import ATEN
from strata.kernels.quant.packed import PackedWeight

# Of all operations that multiply by experts; what the last does, `frozen_call` tells.
CONVERTED, FROZEN = "packed, tiles", "of frozen weights"
Biases = tuple[Tensor | None, Tensor | None]
NO_BIASES: Biases = None, None


def converted_take(x: Tensor, gate_up: PackedWeight, down: PackedWeight) -> bool:
    """Whether kernels can read rows like x and these weights of all experts."""
    # What lies between the products is contiguous.
    inner = torch.empty((1, down.shape[2]), dtype=x.dtype, device="meta")
    return is_readable(x, gate_up) and is_readable(inner, down)


def converted_rows(
    x: Tensor,
    order: Order,
    per_token: int,
    gate_up: PackedWeight,
    down: PackedWeight,
    biases: Biases = NO_BIASES,
    clamp: Clamp | None = None,
) -> Tensor:
    """What experts make of the rows of an order, [rows, hidden], x not rounded: one product fetches rows and gates, one
    follows."""
    first, last = biases
    inner = packed_grouped_product(
        ordered(x, gate_up),
        gate_up,
        order.ends,
        source=order.source,
        per_token=per_token,
        gated=True,
        bias=first,
        clamp=clamp,
    )
    return packed_grouped_product(ordered(inner, down), down, order.ends, bias=last)


def converted_kernels(
    x: Tensor, weights: Tensor | None, chosen: Tensor, gate_up: PackedWeight, down: PackedWeight, *others: object
) -> tuple[Any, ...]:
    each = [(packed_grouped_kernel,) if one.order is None else (ATEN, packed_grouped_kernel) for one in (gate_up, down)]
    return *order_kernels(chosen), *each[0], *each[1], combine_kernel


def converted_scratch(
    x: Tensor, weights: Tensor | None, chosen: Tensor, gate_up: PackedWeight, down: PackedWeight, *others: object
) -> int:
    """Bytes of the order of rows, of what is gated and of what comes out of it, beside the sums."""
    count, hidden, width = down.shape
    inner, outer = (chosen.numel() * columns * x.element_size() for columns in (width, hidden))
    return 16 * chosen.numel() + 4 * count + outer + max(0, inner - x.nbytes)
