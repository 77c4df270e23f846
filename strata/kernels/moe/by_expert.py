"""Experts one after another, as references and CPUs have them, and rows in the order of their experts and back."""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strata.kernels.moe.calls import AnyExpertsCall, ExpertsCall, LocalExpertsCall, biases_of, clamp_of
from strata.kernels.moe.combine import combine, permuted
from strata.kernels.moe.local_order import local_numbers
from strata.kernels.moe.order import Order
from strata.kernels.quant.packed import each_expert


def by_expert(
    call: AnyExpertsCall[Any],
    product: Callable[..., Tensor],
    activation: Callable[..., Tensor],
    clamped_activation: Callable[..., Tensor],
) -> Tensor:
    """One product after another. Waits for the device, which has to tell how many rows each expert has."""
    x, weights, chosen, gate_up, down = call[:5]
    (first, last), clamp, count = biases_of(call), clamp_of(call), down.shape[0]
    filled = call.filled if isinstance(call, ExpertsCall) else None
    if isinstance(call, LocalExpertsCall):
        chosen = local_numbers(chosen, call.first, count, call.placement, call.slot_mapping)
        filled = int((chosen >= 0).sum())
    order = Order.of(chosen, count, empty=filled is not None).with_rows(filled)
    ends = order.ends.tolist()
    rows = take_rows(x, order).split([end - start for start, end in zip([0, *ends], ends, strict=False)])
    first_biases, last_biases = ([None] * count if biases is None else biases for biases in (first, last))
    parts = []
    # Experts without rows too: every parameter takes part, so each has a gradient.
    for own, into, first_bias, out_of, last_bias in zip(
        rows, each_expert(gate_up), first_biases, each_expert(down), last_biases, strict=True
    ):
        gate, up = product(own, into, first_bias).chunk(2, -1)
        inner = activation(gate, up) if clamp is None else clamped_activation(gate, up, clamp)
        parts.append(product(inner, out_of, last_bias))
    return give_back(torch.cat(parts), order, weights)


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
