"""Expert MLPs of a mixture (Shazeer et al. 2017): tokens are sorted by expert, and each expert multiplies its own.

Those of gpt-oss (OpenAI 2025) have biases and an activation within bounds. With expert parallelism where every rank has
all tokens, a rank computes its own experts' part of the weighted sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.silu_mul import clamped_swiglu, silu_mul, silu_mul_kernel
from strata.kernels.choose import thresholds
from strata.kernels.linear.linear import linear
from strata.kernels.linear.quantized.frozen import frozen_call
from strata.kernels.linear.quantized.small_m import ordered
from strata.kernels.moe.calls import (
    AnyExpertsCall,
    BiasedExpertsCall,
    ExpertsCall,
    LocalExpertsCall,
    biases_of,
    clamp_of,
)
from strata.kernels.moe.combine import by_expert, combine_kernel, give_back, take_rows, weighted_sums
from strata.kernels.moe.grouped import grouped_product, reads, reads_quantized
from strata.kernels.moe.grouped_kernels import grouped_kernel, quantized_grouped_kernel
from strata.kernels.moe.local_order import Order, local_order, order_kernels
from strata.kernels.moe.small_m import CHOICE_KERNELS, by_choices, streams
from strata.kernels.op import ATEN, Operation, has_quantized, operation
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.quant.round_rows import round_rows, round_rows_kernel

# Of packed weights; what the last does, `frozen_call` tells.
CHOICES, ROUNDED, CONVERTED, FROZEN = "packed, choices", "packed, rounded", "packed, tiles", "of frozen weights"

_round = round_rows.bind("cuda")


def _cost(call: AnyExpertsCall[Any], *, workload: Workload) -> Cost:
    x, weights, chosen, gate_up, down = call[:5]
    count, hidden, width = down.shape
    rows, slots, where = chosen.numel(), count, 0
    if isinstance(call, LocalExpertsCall):  # choices fall evenly on all slots
        slots, where = call.slots, 0 if call.placement is None else rows * call.placement.itemsize
    elif isinstance(call, ExpertsCall) and call.filled is not None:
        rows = call.filled
    biases = [bias for bias in biases_of(call) if bias is not None]
    # Three products with their biases, the activation's operations, and the weighted sum.
    each = 6 * width * hidden + sum(bias.shape[1] for bias in biases) + (5 if clamp_of(call) is None else 11) * width
    flops = round(rows * count / slots * (each + (0 if weights is None else 2 * hidden)))
    expert = expert_bytes(gate_up, down, *biases)
    used = round(expected_experts(len(chosen), rows, slots) * count / slots * expert)
    read = x.nbytes + (0 if weights is None else weights.nbytes) + chosen.nbytes + where + used
    return Cost(flops, read, x.nbytes, used)


def expert_bytes(*stacked: Tensor | QuantizedWeight) -> int:
    """Of one expert, in tensors of all."""
    return sum(one.nbytes // one.shape[0] for one in stacked)


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
    return by_expert(call, linear.reference, silu_mul.reference, clamped_swiglu.reference)


@operation(_cost, operands=BiasedExpertsCall, rowwise=True, packable=(3, 4), mixture=True)
def biased_experts(call: BiasedExpertsCall[Any]) -> Tensor:
    """For each token the sum over its experts e of `weight * (down[e](clamped_swiglu(gate[e](x), up[e](x))))`.

    Returns [tokens, hidden] in x's dtype; the sum is of the dtype of the weights.
    """
    return by_expert(call, linear.reference, silu_mul.reference, clamped_swiglu.reference)


# Of copies, which rank computes a row follows from the row's place; the sum over the ranks is rowwise all the same.
@operation(_cost, operands=LocalExpertsCall, rowwise=True, packable=(3, 4), mixture=True)
def local_experts(call: LocalExpertsCall[Any]) -> Tensor:
    """A rank's part of `experts`: the sum over those of a token's experts that this rank computes; zeros for none.

    The sum over all ranks is what `experts` gives. How many choices are this rank's stays on the device. Returns
    [tokens, hidden] in x's dtype.
    """
    return by_expert(call, linear.reference, silu_mul.reference, clamped_swiglu.reference)


def order_of(call: AnyExpertsCall[Any]) -> Order:
    """Of the rows that are multiplied here. Nothing waits for the device."""
    count = call.down.shape[0]
    if isinstance(call, LocalExpertsCall):
        return local_order(call.chosen, call.first, count, call.placement, call.slot_mapping)
    order = local_order(call.chosen, 0, count)
    return order.with_rows(call.filled) if isinstance(call, ExpertsCall) else order


def _sums(call: AnyExpertsCall[Any], rows: Tensor, order: Order) -> Tensor:
    if isinstance(call, LocalExpertsCall):  # rows behind the last end are unwritten, and nobody reads them
        return weighted_sums(rows, order.inverse, call.weights, full=False)
    return give_back(rows, order, call.weights)


def _takes(reader: Callable[[Tensor, Any], bool], call: AnyExpertsCall[Any]) -> bool:
    """Whether kernels read the operands of a call. reader: whether they read rows and a weight. What a rank computes of
    a sum is added up by the kernel alone, other sums by `combine`, which has a way for any weights."""
    x, _, chosen, gate_up, down = call[:5]
    biases = call[5:7] if isinstance(call, BiasedExpertsCall) else ()
    return (
        (_kernel_adds(call) or not isinstance(call, LocalExpertsCall))
        and chosen.is_contiguous()
        and all(bias.is_contiguous() for bias in biases)
        and reader(x, gate_up)
        and reader(x, down)  # what lies between the products is contiguous
    )


def _kernel_adds(call: AnyExpertsCall[Any]) -> bool:
    """Whether a kernel adds up what a token's experts made of it, by such weights."""
    weights = call.weights
    return weights is None or (weights.dtype == torch.float32 and weights.is_contiguous())


def choices_take(call: AnyExpertsCall[Any]) -> bool:
    """Whether there are so few tokens that each reads its experts' weights by itself."""
    few = 0 < len(call.chosen) <= thresholds(call.x.device).choice_tokens
    return few and _kernel_adds(call) and _takes(streams, call)


def _rounded_take(call: AnyExpertsCall[QuantizedWeight]) -> bool:
    many = call.chosen.numel() > thresholds(call.x.device).converted_rows * call.down.shape[0]
    return many and _takes(reads_quantized, call)


def library_takes(x: Tensor, *matrices: Tensor) -> bool:
    """Whether the library multiplies rows like x by such matrices of all experts without asking the device: bfloat16,
    rows that begin at multiples of 16 bytes, Hopper."""
    capable = not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0)
    aligned = all(size % 8 == 0 for matrix in matrices for size in matrix.shape[1:])
    return x.dtype == torch.bfloat16 and capable and aligned and all(matrix.is_contiguous() for matrix in matrices)


def _library_takes(call: AnyExpertsCall[Tensor]) -> bool:
    return library_takes(call.x, call.gate_up, call.down)


def _is_long(call: LocalExpertsCall[Tensor]) -> bool:
    """What the library takes, of so many choices that the rows of others, which are copied all the same, cost less than
    its larger tiles save."""
    many = call.chosen.numel() > thresholds(call.x.device).local_choices
    return many and _library_takes(call) and _takes(reads, call)


def library_is_faster(call: AnyExpertsCall[Tensor]) -> bool:
    """For the product by what leads out of the experts."""
    x, chosen, down = call.x, call.chosen, call.down
    alone = isinstance(call, ExpertsCall) and isinstance(down, Tensor)
    return alone and chosen.numel() > thresholds(x.device).library_rows * len(down) and library_takes(x, down)


def by_tiles(call: AnyExpertsCall[Any], *, rounded: bool = False) -> Tensor:
    """A product that fetches the rows, adds biases and applies the gate, and one that follows, of the library's if it
    is faster; neither does anything for what other ranks compute. rounded: of rows in 8 bits."""
    x, _, chosen, gate_up, down = call[:5]
    if chosen.numel() == 0:
        return torch.zeros_like(x)
    order, (first, last) = order_of(call), biases_of(call)
    fetched: dict[str, Any] = {"source": order.source, "per_token": chosen.shape[1], "gated": True}
    rows = _product(x, gate_up, order, rounded, bias=first, clamp=clamp_of(call), **fetched)
    if library_is_faster(call):
        rows = torch._grouped_mm(rows, down.transpose(1, 2), offs=order.ends)
    else:
        rows = _product(rows, down, order, rounded, bias=last)
    return _sums(call, rows, order)


def _product(x: Tensor, weight: Tensor | QuantizedWeight, order: Order, rounded: bool, **more: Any) -> Tensor:
    if isinstance(weight, Tensor):
        return grouped_product(x, weight, order.ends, **more)
    rows = ordered(x, weight)
    if not rounded:
        return grouped_product(rows, weight, order.ends, **more)
    values, scales = _round(rows, weight.kind, weight.columns, weight.input_scale)
    return grouped_product(values, weight, order.ends, x_scales=scales, dtype=x.dtype, **more)


def by_library(call: AnyExpertsCall[Tensor]) -> Tensor:
    """The library's products over all experts; how many rows each has stays on the device."""
    x, _, chosen, gate_up, down = call[:5]
    order, (first, last), clamp = order_of(call), biases_of(call), clamp_of(call)
    rows = torch._grouped_mm(take_rows(x, order), gate_up.transpose(1, 2), offs=order.ends)
    if first is not None:
        expert = chosen.flatten().index_select(0, order.source)
        rows = rows + first.index_select(0, expert)
    gate, up = rows.chunk(2, -1)
    inner: Tensor = silu_mul(gate, up) if clamp is None else clamped_swiglu(gate, up, clamp)
    rows = torch._grouped_mm(inner, down.transpose(1, 2), offs=order.ends)
    return _sums(call, rows if last is None else rows + last.index_select(0, expert), order)


def _kernels(*each: Any) -> Callable[[AnyExpertsCall[Any]], tuple[Any, ...]]:
    """each: what either product by our kernels launches, behind what orders columns."""

    def of(call: AnyExpertsCall[Any]) -> tuple[Any, ...]:
        first, last = ((*[ATEN] * (getattr(one, "order", None) is not None), *each) for one in call[3:5])
        products = *first, *((ATEN,) if library_is_faster(call) else last)
        return *order_kernels(call.chosen), *products, combine_kernel if _kernel_adds(call) else ATEN

    return of


def _library_kernels(call: AnyExpertsCall[Tensor]) -> tuple[Any, ...]:
    activation = (silu_mul_kernel, ATEN) if clamp_of(call) is None else ()
    return *order_kernels(call.chosen), ATEN, *activation, combine_kernel if _kernel_adds(call) else ATEN


def _tiles_scratch(call: AnyExpertsCall[Any]) -> int:
    """Bytes of the order of rows, of what is gated and of what comes out of it, beside the sums."""
    x, _, chosen, _, down = call[:5]
    count, hidden, width = down.shape
    inner, outer = (chosen.numel() * columns * x.element_size() for columns in (width, hidden))
    return int(16 * chosen.numel() + 4 * count + outer + max(0, inner - x.nbytes))


def _rounded_scratch(call: AnyExpertsCall[QuantizedWeight]) -> int:
    """As `_tiles_scratch`, and rows in 8 bits with their scales, of x and of what is gated, which stay as long."""
    x, _, chosen, gate_up, down = call[:5]
    of_x, of_inner = (
        columns + 4 * (-(-columns // weight.columns) if weight.columns else 1)
        for columns, weight in ((x.shape[1], gate_up), (down.shape[2], down))
    )
    return _tiles_scratch(call) + len(chosen) * of_x + chosen.numel() * of_inner


def _choices_scratch(call: AnyExpertsCall[Any]) -> int:
    """Of what is gated, of each token's choices."""
    return int(call.chosen.numel() * call.down.shape[2] * call.x.element_size())


def _library_scratch(call: AnyExpertsCall[Tensor]) -> int:
    """Of rows in their order, gates and ups, these gated, and what comes out of them, beside the sums."""
    x, _, chosen, _, down = call[:5]
    order, each = 16 * chosen.numel() + 4 * len(down), chosen.numel() * x.element_size()
    return int(order + each * (2 * down.shape[1] + 3 * down.shape[2]) - x.nbytes)


def _in_place(call: AnyExpertsCall[Any]) -> bool:
    """Which rank rounds a part of the sum may not depend on where in the batch a token stands."""
    return not isinstance(call, LocalExpertsCall) or call.placement is None or call.placement.shape[1] == 1


def _fixed(call: AnyExpertsCall[Any]) -> Tensor:
    product = linear.bind("cpu", deterministic=True, packed=has_quantized(call))
    return by_expert(call, product, *(one.bind("cpu", deterministic=True) for one in (silu_mul, clamped_swiglu)))


def _implement(operation: Operation, *, is_part: bool) -> None:
    """is_part: of a rank's own experts, which have no gradients, and of few choices no kernels of their own."""

    def frozen(call: AnyExpertsCall[QuantizedWeight]) -> Tensor:
        return frozen_call(operation.bind(call.x.device.type, differentiable=not is_part), *call)

    operation.by_definition("cpu", name="an expert at a time", differentiable=not is_part)
    operation.implement("batch-invariant tiles", "cpu", invariant=True, supports=_in_place)(_fixed)
    operation.implement("batch-invariant tiles, unpacked", "cpu", invariant=True, supports=_in_place, packed=True)(
        _fixed
    )
    library: dict[str, Any] = {"kernels": _library_kernels, "scratch": _library_scratch}
    choices: dict[str, Any] = {"supports": choices_take, "kernels": CHOICE_KERNELS, "scratch": _choices_scratch}
    tiles: dict[str, Any] = {"supports": partial(_takes, reads), "scratch": _tiles_scratch}
    if is_part:
        operation.in_triton(by_library, "grouped", supports=_is_long, **library)
    else:
        operation.in_triton(by_choices, "triton choices", **choices)
        operation.in_triton(by_choices, CHOICES, packed=True, **choices)
    operation.in_triton(by_tiles, "triton tiles", kernels=_kernels(grouped_kernel), **tiles)
    kernels = _kernels(round_rows_kernel, grouped_kernel)
    rounded: dict[str, Any] = {"supports": _rounded_take, "kernels": kernels, "scratch": _rounded_scratch}
    operation.in_triton(partial(by_tiles, rounded=True), ROUNDED, packed=True, **rounded)
    operation.in_triton(by_tiles, CONVERTED, packed=True, kernels=_kernels(quantized_grouped_kernel), **tiles)
    if not is_part:
        operation.implement("grouped", "cuda", differentiable=True, supports=_library_takes, **library)(by_library)
        operation.implement(FROZEN, "cpu", differentiable=True, packed=True)(frozen)
    operation.implement(FROZEN, "cuda", differentiable=not is_part, packed=True)(frozen)


for _operation in (experts, biased_experts, local_experts):
    _implement(_operation, is_part=_operation is local_experts)
