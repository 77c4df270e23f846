"""Expert MLPs of a mixture (Shazeer et al. 2017): tokens are sorted by expert, and each expert multiplies its own."""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.silu_mul import silu_mul, silu_mul_kernel
from strata.kernels.linear.linear import linear
from strata.kernels.moe.combine import combine, combine_kernel, permuted
from strata.kernels.moe.grouped import grouped_kernel, grouped_product
from strata.kernels.moe.held_order import held_order, order_kernels
from strata.kernels.moe.order import Order
from strata.kernels.op import ATEN, operation
from strata.kernels.triton_import import HAS_TRITON


def _cost(
    x: Tensor,
    weights: Tensor | None,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    filled: int | None = None,
    *,
    workload: Workload,
) -> Cost:
    count, hidden, width = down.shape
    rows = chosen.numel() if filled is None else filled
    # Three products, the activation's five operations, and the weighted sum.
    flops = 6 * rows * width * hidden + 5 * rows * width + (0 if weights is None else 2 * rows * hidden)
    used = round(expected_experts(len(chosen), rows, count) * (gate_up[0].nbytes + down[0].nbytes))
    read = x.nbytes + (0 if weights is None else weights.nbytes) + chosen.nbytes + used
    return Cost(flops, read, x.nbytes, used)


def expected_experts(tokens: int, rows: int, count: int) -> float:
    """How many of `count` experts some token reads on average, if `rows` rows fall evenly on tokens and experts.

    An expert is missed by a token that has k of E experts with probability 1 - k / E, and so by n with its nth power.
    """
    if rows == 0:
        return 0.0
    return count * (1 - (1 - rows / (tokens * count)) ** tokens)


@operation(_cost, rowwise=True)
def experts(
    x: Tensor, weights: Tensor | None, chosen: Tensor, gate_up: Tensor, down: Tensor, filled: int | None = None
) -> Tensor:
    """For each token the sum over its experts e of `weight * down[e](silu(gate[e](x)) * up[e](x))`.

    x: [tokens, hidden]. chosen: [tokens, per_token] int64 or int32. weights: like chosen, of x's dtype or wider; None
    if each token has one expert, of weight 1. filled: how many of `chosen` are experts if the others are -1, which are
    left out; None: all.
    gate_up: [experts, 2 * width, hidden], the rows of gate before those of up; down: [experts, hidden, width]; both of
    x's dtype. Returns [tokens, hidden] in x's dtype; the sum is of the dtype of the weights. An expert without a token
    has a gradient of zeros.
    """
    return _by_expert(x, weights, chosen, gate_up, down, filled, F.linear, silu_mul.reference)


def take_rows(x: Tensor, order: Order) -> Tensor:
    """x [tokens, hidden] -> in each slot the row of its token, [rows, hidden]; gradients are added in fixed order."""
    if len(order.source) == len(order.inverse) and order.inverse.shape[1] == 1:
        return permuted(x, order.source, order.inverse.flatten())
    return _TakeRows.apply(x, order.source, order.inverse)


def give_back(rows: Tensor, order: Order, weights: Tensor | None) -> Tensor:
    """rows [slots, hidden] and weights [tokens, per_token] -> weighted sums [tokens, hidden] in the dtype of rows.

    weights: None if a token has one row, which it gets back as it is; otherwise that is a ValueError.
    """
    if weights is None:
        per_token = order.inverse.shape[1]
        if per_token != 1:
            raise ValueError(f"tokens with {per_token} experts each need weights: None is for one of weight 1")
        return permuted(rows, order.inverse.flatten(), order.source)
    return combine(rows, order.source, order.inverse, weights)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(source, inverse)
        return x.index_select(0, source // inverse.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return combine(grads[0].contiguous(), *ctx.saved_tensors, None), None, None


def _by_expert(
    x: Tensor,
    weights: Tensor | None,
    chosen: Tensor,
    gate_up: Tensor,
    down: Tensor,
    filled: int | None,
    product: Callable[[Tensor, Tensor], Tensor],
    activation: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """One product after another. Waits for the device, which has to tell how many rows each expert has."""
    order = Order.of(chosen, len(down), empty=filled is not None).with_rows(filled)
    ends = order.ends.tolist()
    rows = take_rows(x, order).split([end - start for start, end in zip([0, *ends], ends, strict=False)])
    parts = []
    # Experts without rows too: every parameter takes part, so each has a gradient.
    for own, into, out_of in zip(rows, gate_up, down, strict=True):
        gate, up = product(own, into).chunk(2, -1)
        parts.append(product(activation(gate, up), out_of))
    return give_back(torch.cat(parts), order, weights)


experts.implement("an expert at a time", "cpu", differentiable=True)(experts.reference)


@experts.implement("fixed tiles", "cpu", invariant=True)
def _fixed(
    x: Tensor, weights: Tensor | None, chosen: Tensor, gate_up: Tensor, down: Tensor, filled: int | None = None
) -> Tensor:
    product = linear.bind("cpu", deterministic=True)
    activation = silu_mul.bind("cpu", deterministic=True)
    return _by_expert(x, weights, chosen, gate_up, down, filled, product, activation)


def _grouped_supports(
    x: Tensor, weights: Tensor | None, chosen: Tensor, gate_up: Tensor, down: Tensor, *others: object
) -> bool:
    """What the library takes without asking the device: bfloat16, rows that begin at multiples of 16 bytes, Hopper."""
    aligned = x.shape[-1] % 8 == 0 and down.shape[-1] % 8 == 0
    capable = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)
    return x.dtype == torch.bfloat16 and aligned and capable and gate_up.is_contiguous() and down.is_contiguous()


def _library_kernels(x: Tensor, weights: Tensor | None, chosen: Tensor, *others: object) -> tuple[Any, ...]:
    return *order_kernels(chosen), ATEN, silu_mul_kernel, ATEN, combine_kernel


def tile_kernels(x: Tensor, weights: Tensor | None, chosen: Tensor, *others: object) -> tuple[Any, ...]:
    return *order_kernels(chosen), grouped_kernel, grouped_kernel, combine_kernel


# So many rows an expert, and the library's products are faster by more than fetching and gating apart from them takes.
MOST_ROWS = 256


def tiles_support(
    x: Tensor, weights: Tensor | None, chosen: Tensor, gate_up: Tensor, down: Tensor, *others: object
) -> bool:
    kinds = {x.dtype, gate_up.dtype, down.dtype}
    return (
        len(kinds) == 1
        and kinds <= {torch.bfloat16, torch.float16, torch.float32}
        and gate_up.is_contiguous()
        and down.is_contiguous()
    )


def tiles_are_faster(
    x: Tensor, weights: Tensor | None, chosen: Tensor, gate_up: Tensor, down: Tensor, *others: object
) -> bool:
    """Whether few enough rows come to an expert for products of our own."""
    few = chosen.numel() <= MOST_ROWS * len(down)
    return few and x.dtype != torch.float32 and tiles_support(x, weights, chosen, gate_up, down)


def by_tiles(
    x: Tensor, weights: Tensor | None, chosen: Tensor, gate_up: Tensor, down: Tensor, filled: int | None = None
) -> Tensor:
    """Two products of our own: one fetches the rows and applies the gate, the other follows."""
    order = held_order(chosen, 0, len(down)).with_rows(filled)
    inner = grouped_product(x, gate_up, order.ends, source=order.source, per_token=chosen.shape[1], gated=True)
    return give_back(grouped_product(inner, down, order.ends), order, weights)


if HAS_TRITON:
    experts.implement("tiles", "cuda", supports=tiles_are_faster, kernels=tile_kernels)(by_tiles)


@experts.implement("grouped", "cuda", differentiable=True, supports=_grouped_supports, kernels=_library_kernels)
def grouped(
    x: Tensor, weights: Tensor | None, chosen: Tensor, gate_up: Tensor, down: Tensor, filled: int | None = None
) -> Tensor:
    """One product of the library over all experts; how many rows each has stays on the device."""
    order = held_order(chosen, 0, len(down)).with_rows(filled)
    rows = take_rows(x, order)
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=order.ends).chunk(2, -1)
    rows = torch._grouped_mm(silu_mul(gate, up), down.transpose(1, 2), offs=order.ends)
    return give_back(rows, order, weights)


if HAS_TRITON:
    experts.implement("triton", "cuda", supports=tiles_support, kernels=tile_kernels)(by_tiles)
