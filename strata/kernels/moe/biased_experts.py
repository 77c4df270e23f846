"""Expert MLPs whose products have biases and whose activation is bounded, as those of gpt-oss (OpenAI 2025)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.activation.clamped_swiglu import Clamp, clamped_swiglu
from strata.kernels.linear.linear import linear
from strata.kernels.linear.packed.frozen import frozen_call
from strata.kernels.moe.calls import BiasedExpertsCall
from strata.kernels.moe.combine import combine_kernel
from strata.kernels.moe.experts import (
    choices_scratch,
    choices_take,
    expected_experts,
    give_back,
    library_supports,
    ours_take,
    take_rows,
    tile_kernels,
)
from strata.kernels.moe.few_tokens import CHOICE_KERNELS, by_choices
from strata.kernels.moe.grouped import grouped_product
from strata.kernels.moe.held_order import held_order, order_kernels
from strata.kernels.moe.order import Order
from strata.kernels.moe.packed_experts import CHOICES, FROZEN, WAYS
from strata.kernels.moe.packed_few_tokens import PACKED_CHOICE_KERNELS, by_packed_choices, packed_choices_take
from strata.kernels.op import ATEN, has_packed, operation
from strata.kernels.quant.packed import PackedWeight, each_expert
from strata.kernels.triton_import import HAS_TRITON


def _cost(call: BiasedExpertsCall[Any], *, workload: Workload) -> Cost:
    x, weights, chosen, gate_up, down, gate_up_bias, down_bias, _, adds_down_bias = call
    count, hidden, width = down.shape
    rows = chosen.numel()
    # Three products with their biases, the activation's eleven operations, and the weighted sum.
    biases = 2 * width + adds_down_bias * hidden
    flops = rows * (6 * width * hidden + biases + 11 * width + 2 * hidden)
    expert = expert_bytes(gate_up, down, gate_up_bias, *[down_bias] * adds_down_bias)
    used = round(expected_experts(len(chosen), rows, count) * expert)
    return Cost(flops, x.nbytes + weights.nbytes + chosen.nbytes + used, x.nbytes, used)


def expert_bytes(*stacked: Tensor | PackedWeight) -> int:
    """Of one expert, in tensors of all."""
    return sum(one.nbytes // one.shape[0] for one in stacked)


@operation(_cost, operands=BiasedExpertsCall, rowwise=True, packable=(3, 4), mixture=True)
def biased_experts(call: BiasedExpertsCall[Any]) -> Tensor:
    """For each token the sum over its experts e of `weight * (down[e](clamped_swiglu(gate[e](x), up[e](x))))`.

    Returns [tokens, hidden] in x's dtype; the sum is of the dtype of the weights.
    """
    return _by_expert(call, linear.reference, clamped_swiglu.reference)


def _by_expert(
    call: BiasedExpertsCall[Any],
    product: Callable[..., Tensor],
    activation: Callable[[Tensor, Tensor, Clamp], Tensor],
) -> Tensor:
    """One product after another. Waits for the device, which has to tell how many rows each expert has."""
    x, weights, chosen, gate_up, down, *_, clamp, _ = call
    gate_up_bias, down_bias = call.biases
    order = Order.of(chosen, down.shape[0])
    ends = order.ends.tolist()
    rows = take_rows(x, order).split([end - start for start, end in zip([0, *ends], ends, strict=False)])
    last_biases = [None] * down.shape[0] if down_bias is None else down_bias
    parts = []
    for own, into, bias, out_of, last_bias in zip(
        rows, each_expert(gate_up), gate_up_bias, each_expert(down), last_biases, strict=True
    ):
        gate, up = product(own, into, bias).chunk(2, -1)
        parts.append(product(activation(gate, up, clamp), out_of, last_bias))
    return give_back(torch.cat(parts), order, weights)


biased_experts.implement("an expert at a time", "cpu", differentiable=True)(biased_experts.definition)


@biased_experts.implement("fixed tiles", "cpu", invariant=True)
def _fixed(call: BiasedExpertsCall[Any]) -> Tensor:
    product = linear.bind("cpu", deterministic=True, packed=has_packed(call))
    return _by_expert(call, product, clamped_swiglu.bind("cpu", deterministic=True))


biased_experts.implement("fixed tiles, unpacked", "cpu", invariant=True, packed=True)(_fixed)


def _choices_support(call: BiasedExpertsCall[Tensor]) -> bool:
    return choices_take(call, *call[5:7])


def _tiles_support(call: BiasedExpertsCall[Tensor]) -> bool:
    return ours_take(call.x, *call[3:7])


def _tiles_scratch(call: BiasedExpertsCall[Tensor]) -> int:
    """As `tiles_scratch`, but what is gated stays until the rows are summed."""
    x, _, chosen, _, down = call[:5]
    order, columns = 16 * chosen.numel() + 4 * len(down), down.shape[1] + down.shape[2]
    return order + chosen.numel() * columns * x.element_size()


def _by_tiles(call: BiasedExpertsCall[Tensor]) -> Tensor:
    """A product that fetches the rows, adds biases and applies the gate, and one that follows."""
    x, weights, chosen, gate_up, down, *_, clamp, _ = call
    first, last = call.biases
    order = held_order(chosen, 0, len(down))
    inner = grouped_product(
        x,
        gate_up,
        order.ends,
        source=order.source,
        per_token=chosen.shape[1],
        gated=True,
        bias=first,
        clamp=clamp,
    )
    rows = grouped_product(inner, down, order.ends, bias=last)
    return give_back(rows, order, weights)


if HAS_TRITON:
    biased_experts.implement(
        "triton choices", "cuda", supports=_choices_support, kernels=CHOICE_KERNELS, scratch=choices_scratch
    )(by_choices)
    biased_experts.implement(
        "triton tiles", "cuda", supports=_tiles_support, kernels=tile_kernels, scratch=_tiles_scratch
    )(_by_tiles)


def _library_kernels(call: BiasedExpertsCall[Tensor]) -> tuple[Any, ...]:
    return *order_kernels(call.chosen), ATEN, combine_kernel


@biased_experts.implement("grouped", "cuda", differentiable=True, supports=library_supports, kernels=_library_kernels)
def by_library(call: BiasedExpertsCall[Tensor]) -> Tensor:
    """The library's grouped products; how many rows each expert has stays on the device."""
    x, weights, chosen, gate_up, down, gate_up_bias, down_bias, clamp, adds_down_bias = call
    order = held_order(chosen, 0, len(down))
    expert = chosen.flatten().index_select(0, order.source)
    both = torch._grouped_mm(take_rows(x, order), gate_up.transpose(1, 2), offs=order.ends)
    gate, up = (both + gate_up_bias.index_select(0, expert)).chunk(2, -1)
    rows = torch._grouped_mm(clamped_swiglu(gate, up, clamp), down.transpose(1, 2), offs=order.ends)
    if adds_down_bias:
        rows = rows + down_bias.index_select(0, expert)
    return give_back(rows, order, weights)


def _has_biases(supports: Callable[..., bool], call: BiasedExpertsCall[PackedWeight]) -> bool:
    """Whether kernels take what is given and can read its biases."""
    return all(bias.is_contiguous() for bias in call[5:7]) and supports(call)


def _packed(rows_of: Callable[..., Tensor], call: BiasedExpertsCall[PackedWeight]) -> Tensor:
    order = held_order(call.chosen, 0, call.down.shape[0])
    return give_back(rows_of(call, order), order, call.weights)


if HAS_TRITON:
    biased_experts.implement(
        CHOICES,
        "cuda",
        supports=partial(_has_biases, packed_choices_take),
        kernels=PACKED_CHOICE_KERNELS,
        packed=True,
        scratch=choices_scratch,
    )(by_packed_choices)
for _way in WAYS:
    biased_experts.implement(
        _way.name,
        "cuda",
        supports=partial(_has_biases, _way.supports),
        kernels=_way.kernels,
        packed=True,
        scratch=_way.scratch,
    )(partial(_packed, _way.rows))


@biased_experts.implement(FROZEN, "cpu", differentiable=True, packed=True)
@biased_experts.implement(FROZEN, "cuda", differentiable=True, packed=True)
def _frozen(call: BiasedExpertsCall[PackedWeight]) -> Tensor:
    return frozen_call(biased_experts.bind(call.x.device.type, differentiable=True), *call)
