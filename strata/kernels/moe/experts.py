"""Expert MLPs of a mixture (Shazeer et al. 2017): tokens are sorted by expert, and each expert multiplies its own."""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.silu_mul import silu_mul, silu_mul_kernel
from strata.kernels.choose import thresholds
from strata.kernels.linear.linear import linear
from strata.kernels.linear.packed.frozen import frozen_call
from strata.kernels.moe.calls import AnyExpertsCall, ExpertsCall
from strata.kernels.moe.combine import combine, combine_kernel, permuted
from strata.kernels.moe.few_tokens import CHOICE_KERNELS, by_choices
from strata.kernels.moe.grouped import grouped_kernel, grouped_product
from strata.kernels.moe.held_order import held_order, order_kernels
from strata.kernels.moe.order import Order
from strata.kernels.moe.packed_experts import CHOICES, FROZEN, WAYS
from strata.kernels.moe.packed_few_tokens import PACKED_CHOICE_KERNELS, by_packed_choices, packed_choices_take
from strata.kernels.op import ATEN, has_packed, operation
from strata.kernels.quant.packed import PackedWeight, each_expert
from strata.kernels.triton_import import HAS_TRITON


def _cost(call: ExpertsCall[Any], *, workload: Workload) -> Cost:
    x, weights, chosen, gate_up, down, filled = call
    count, hidden, width = down.shape
    rows = chosen.numel() if filled is None else filled
    # Three products, the activation's five operations, and the weighted sum.
    flops = 6 * rows * width * hidden + 5 * rows * width + (0 if weights is None else 2 * rows * hidden)
    used = round(expected_experts(len(chosen), rows, count) * (gate_up.nbytes + down.nbytes) / count)
    read = x.nbytes + (0 if weights is None else weights.nbytes) + chosen.nbytes + used
    return Cost(flops, read, x.nbytes, used)


def expected_experts(tokens: int, rows: int, count: int) -> float:
    """How many of `count` experts some token reads on average, if `rows` rows fall evenly on tokens and experts.

    An expert is missed by a token that has k of E experts with probability 1 - k / E, and so by n with its nth power.
    """
    if rows == 0:
        return 0.0
    return count * (1 - (1 - rows / (tokens * count)) ** tokens)


@operation(_cost, operands=ExpertsCall, rowwise=True, packable=(3, 4), mixture=True)
def experts(call: ExpertsCall[Any]) -> Tensor:
    """For each token the sum over its experts e of `weight * down[e](silu(gate[e](x)) * up[e](x))`.

    Returns [tokens, hidden] in x's dtype; the sum is of the dtype of the weights. An expert without a token has a
    gradient of zeros.
    """
    return _by_expert(call, linear.reference, silu_mul.reference)


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
    call: ExpertsCall[Any], product: Callable[..., Tensor], activation: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """One product after another. Waits for the device, which has to tell how many rows each expert has."""
    x, weights, chosen, gate_up, down, filled = call
    order = Order.of(chosen, down.shape[0], empty=filled is not None).with_rows(filled)
    ends = order.ends.tolist()
    rows = take_rows(x, order).split([end - start for start, end in zip([0, *ends], ends, strict=False)])
    parts = []
    # Experts without rows too: every parameter takes part, so each has a gradient.
    for own, into, out_of in zip(rows, each_expert(gate_up), each_expert(down), strict=True):
        gate, up = product(own, into).chunk(2, -1)
        parts.append(product(activation(gate, up), out_of))
    return give_back(torch.cat(parts), order, weights)


experts.implement("an expert at a time", "cpu", differentiable=True)(experts.definition)


@experts.implement("fixed tiles", "cpu", invariant=True)
def _fixed(call: ExpertsCall[Any]) -> Tensor:
    product = linear.bind("cpu", deterministic=True, packed=has_packed(call))
    return _by_expert(call, product, silu_mul.bind("cpu", deterministic=True))


experts.implement("fixed tiles, unpacked", "cpu", invariant=True, packed=True)(_fixed)


def library_takes(x: Tensor, *matrices: Tensor) -> bool:
    """Whether the library multiplies rows like x by such matrices of all experts without asking the device: bfloat16,
    rows that begin at multiples of 16 bytes, Hopper."""
    capable = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)
    aligned = all(size % 8 == 0 for matrix in matrices for size in matrix.shape[1:])
    return x.dtype == torch.bfloat16 and capable and aligned and all(matrix.is_contiguous() for matrix in matrices)


def ours_take(x: Tensor, *matrices: Tensor) -> bool:
    """Whether kernels of our own do."""
    kinds = {x.dtype, *(matrix.dtype for matrix in matrices)}
    known = len(kinds) == 1 and kinds <= {torch.bfloat16, torch.float16, torch.float32}
    return known and x.stride(-1) == 1 and all(matrix.is_contiguous() for matrix in matrices)


def choices_take(call: AnyExpertsCall[Tensor], *biases: Tensor) -> bool:
    """Whether there are so few tokens that each reads its experts' weights by itself."""
    x, weights, chosen, gate_up, down = call[:5]
    wide = weights is None or (weights.dtype == torch.float32 and weights.is_contiguous())
    few = 0 < len(chosen) <= thresholds(x.device).choice_tokens
    return few and wide and chosen.is_contiguous() and ours_take(x, gate_up, down, *biases)


def _tiles_support(call: ExpertsCall[Tensor]) -> bool:
    return ours_take(call.x, call.gate_up, call.down)


def library_supports(call: AnyExpertsCall[Tensor]) -> bool:
    return library_takes(call.x, call.gate_up, call.down)


def library_is_faster(x: Tensor, rows: int, down: Tensor) -> bool:
    """For the product of so many rows of all experts by what leads out of them."""
    return rows > thresholds(x.device).library_rows * len(down) and library_takes(x, down)


def _tile_kernels(call: ExpertsCall[Tensor]) -> tuple[Any, ...]:
    last = ATEN if library_is_faster(call.x, call.chosen.numel(), call.down) else grouped_kernel
    return *order_kernels(call.chosen), grouped_kernel, last, combine_kernel


def tile_kernels(call: AnyExpertsCall[Tensor]) -> tuple[Any, ...]:
    return *order_kernels(call.chosen), grouped_kernel, grouped_kernel, combine_kernel


def library_kernels(call: AnyExpertsCall[Tensor]) -> tuple[Any, ...]:
    return *order_kernels(call.chosen), ATEN, silu_mul_kernel, ATEN, combine_kernel


def tiles_scratch(call: AnyExpertsCall[Tensor]) -> int:
    """Bytes of the order of rows, of what is gated and of what comes out of it, beside the sums."""
    x, _, chosen, _, down = call[:5]
    order = 16 * chosen.numel() + 4 * len(down)
    inner, outer = (chosen.numel() * columns * x.element_size() for columns in (down.shape[2], down.shape[1]))
    return order + outer + max(0, inner - x.nbytes)


def choices_scratch(call: AnyExpertsCall[Any]) -> int:
    """Of what is gated, of each token's choices."""
    return int(call.chosen.numel() * call.down.shape[2] * call.x.element_size())


def library_scratch(call: AnyExpertsCall[Tensor]) -> int:
    """Of rows in their order, gates and ups, these gated, and what comes out of them, beside the sums."""
    x, _, chosen, _, down = call[:5]
    order, each = 16 * chosen.numel() + 4 * len(down), chosen.numel() * x.element_size()
    return order + each * (2 * down.shape[1] + 3 * down.shape[2]) - x.nbytes


def by_tiles(call: ExpertsCall[Tensor]) -> Tensor:
    """A product that fetches the rows and applies the gate, and one that follows, of the library's if it is faster."""
    x, weights, chosen, gate_up, down, filled = call
    order = held_order(chosen, 0, len(down)).with_rows(filled)
    rows = grouped_product(x, gate_up, order.ends, source=order.source, per_token=chosen.shape[1], gated=True)
    if library_is_faster(x, chosen.numel(), down):
        rows = torch._grouped_mm(rows, down.transpose(1, 2), offs=order.ends)
    else:
        rows = grouped_product(rows, down, order.ends)
    return give_back(rows, order, weights)


if HAS_TRITON:
    experts.implement("triton choices", "cuda", supports=choices_take, kernels=CHOICE_KERNELS, scratch=choices_scratch)(
        by_choices
    )
    experts.implement("triton tiles", "cuda", supports=_tiles_support, kernels=_tile_kernels, scratch=tiles_scratch)(
        by_tiles
    )


@experts.implement(
    "grouped",
    "cuda",
    differentiable=True,
    supports=library_supports,
    kernels=library_kernels,
    scratch=library_scratch,
)
def grouped(call: ExpertsCall[Tensor]) -> Tensor:
    """One product of the library over all experts; how many rows each has stays on the device."""
    x, weights, chosen, gate_up, down, filled = call
    order = held_order(chosen, 0, len(down)).with_rows(filled)
    rows = take_rows(x, order)
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=order.ends).chunk(2, -1)
    rows = torch._grouped_mm(silu_mul(gate, up), down.transpose(1, 2), offs=order.ends)
    return give_back(rows, order, weights)


def _packed(rows_of: Callable[..., Tensor], call: ExpertsCall[PackedWeight]) -> Tensor:
    if call.chosen.numel() == 0:
        return torch.zeros_like(call.x)
    order = held_order(call.chosen, 0, call.down.shape[0]).with_rows(call.filled)
    return give_back(rows_of(call, order), order, call.weights)


if HAS_TRITON:
    experts.implement(
        CHOICES,
        "cuda",
        supports=packed_choices_take,
        kernels=PACKED_CHOICE_KERNELS,
        packed=True,
        scratch=choices_scratch,
    )(by_packed_choices)
for _way in WAYS:
    experts.implement(
        _way.name, "cuda", supports=_way.supports, kernels=_way.kernels, packed=True, scratch=_way.scratch
    )(partial(_packed, _way.rows))


@experts.implement(FROZEN, "cpu", differentiable=True, packed=True)
@experts.implement(FROZEN, "cuda", differentiable=True, packed=True)
def _frozen(call: ExpertsCall[PackedWeight]) -> Tensor:
    return frozen_call(experts.bind(call.x.device.type, differentiable=True), *call)
