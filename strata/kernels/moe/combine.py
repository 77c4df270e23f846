"""What a token's experts made of it becomes one row: a weighted sum over rows that lie apart, and its gradients.

`by_expert`: experts one after another, as references and CPUs have them, and rows in the order of their experts and
back.
"""
# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.device_limits import stands_in
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.moe.calls import AnyExpertsCall, ExpertsCall, LocalExpertsCall, biases_of, clamp_of
from strata.kernels.moe.local_order import Order, local_numbers
from strata.kernels.op import operation
from strata.kernels.plain_tensor import all_plain
from strata.kernels.quant.quantized import each_expert
from strata.kernels.triton_import import jit, tl


def _cost(rows: Tensor, source: Tensor, inverse: Tensor, weights: Tensor | None, *, workload: Workload) -> Cost:
    tokens, hidden = inverse.shape[0], rows.shape[1]
    read = rows.nbytes + inverse.nbytes + (0 if weights is None else weights.nbytes)
    return Cost((1 if weights is None else 2) * rows.numel(), read, tokens * hidden * rows.itemsize)


def _meta(rows: Tensor, source: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty((inverse.shape[0], rows.shape[1]), device="meta")


@operation(_cost, meta=_meta)
def combine(rows: Tensor, source: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    """For each token the sum over its slots of `weight * rows[inverse]`; zeros for a token without a row.

    rows: [rows, hidden]. inverse: [tokens, per_token] int64, each row once, and -1 where there is none; source: [rows]
    int64, its inverse, by which gradients go back without being added up. weights: [tokens, per_token] of the dtype of
    rows or wider, whose dtype the sum has; None for ones. Returns [tokens, hidden] in the dtype of rows.
    """
    own = permuted(rows, inverse.flatten(), source).unflatten(0, inverse.shape)
    return (own if weights is None else own * weights[..., None]).sum(1).to(rows.dtype)


def summed(rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
    """`combine` without weights, whose backward pass needs no saved tensor."""
    return _WeightedSum.apply(rows, source, inverse)


def permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order], zeros where it is -1; the gradient goes the inverse way, and nothing is added up.

    order has every row once, at `inverse`.
    """
    return _Permute.apply(rows, order, inverse)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, inverse: Tensor) -> Tensor:
        # Not by save_for_backward: a layer is computed again until all saved tensors are there. So it ends before what
        # this adds up, and rows that come from other ranks do not travel again. int32, because it is kept all along.
        ctx.token = (source // inverse.shape[1]).int()
        return combine(rows, source, inverse, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.token), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        if len(order) == len(inverse):
            return rows.index_select(0, order)
        padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        return padded.index_select(0, order.remainder(len(padded)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


@jit
def combine_kernel(
    rows,
    inverse,
    weights,
    out,
    hidden,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [tokens, hidden / BLOCK]. K: slots of a token. FULL: whether each holds a row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = column < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for one in tl.static_range(K):
        at = tl.load(inverse + token * K + one)
        there = held if FULL else held & (at >= 0)
        row = tl.load(rows + at * hidden + column, mask=there, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + token * K + one)
        total += row
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=held)


@jit
def combine_backward_kernel(
    upstream,
    rows,
    inverse,
    weights,
    of_rows,
    of_weights,
    hidden,
    K: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [tokens * K], one for each slot of a token. FULL: whether each holds a row."""
    number = tl.program_id(0).to(tl.int64)
    at = tl.load(inverse + number)
    if not FULL and at < 0:
        tl.store(of_weights + number, 0.0)
        return
    weight = tl.load(weights + number)
    product = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, hidden, BLOCK):
        column = first + tl.arange(0, BLOCK)
        held = column < hidden
        given = tl.load(upstream + number // K * hidden + column, mask=held, other=0.0).to(tl.float32)
        row = tl.load(rows + at * hidden + column, mask=held, other=0.0).to(tl.float32)
        product += given * row
        tl.store(of_rows + at * hidden + column, (given * weight).to(of_rows.dtype.element_ty), mask=held)
    tl.store(of_weights + number, tl.sum(product))


_BLOCK = 1024


def _triton(rows: Tensor, source: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    return weighted_sums(rows, inverse, weights, full=len(rows) == inverse.numel())


def weighted_sums(rows: Tensor, inverse: Tensor, weights: Tensor | None, *, full: bool) -> Tensor:
    """`combine` on CUDA, of rows among which there may be others that no slot names, and that may hold anything.

    full: whether every slot has a row.
    """
    (tokens, per_token), hidden = inverse.shape, rows.shape[1]
    out = torch.empty((tokens, hidden), dtype=rows.dtype, device=rows.device)
    if out.numel():
        known = {"K": per_token, "WEIGHTED": weights is not None, "FULL": full, "BLOCK": _BLOCK}
        combine_kernel[(tokens, ceil_div(hidden, _BLOCK))](rows, inverse, weights, out, hidden, **known, num_warps=4)
    return out


def gradients(upstream: Tensor, rows: Tensor, inverse: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Of `combine` with weights, on CUDA: of rows and of weights."""
    upstream, of_rows, of_weights = upstream.contiguous(), torch.empty_like(rows), torch.empty_like(weights)
    if slots := inverse.numel():
        known = {"K": inverse.shape[1], "FULL": len(rows) == slots, "BLOCK": _BLOCK}
        tensors = (upstream, rows, inverse, weights, of_rows, of_weights)
        combine_backward_kernel[(slots,)](*tensors, rows.shape[1], **known, num_warps=4)
    return of_rows, of_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, inverse, weights)
        return _triton(rows, source, inverse, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, Tensor]:
        of_rows, of_weights = gradients(grads[0], *ctx.saved_tensors)
        return of_rows, None, None, of_weights


def _fits(rows: Tensor, source: Tensor, inverse: Tensor, weights: Tensor | None) -> bool:
    given = [rows, inverse] if weights is None else [rows, inverse, weights]
    wide = weights is None or weights.dtype == torch.float32
    plain = all_plain(*given) or all(map(stands_in, given))
    return wide and plain and all(one.is_contiguous() for one in given)


def _weighted_fits(rows: Tensor, source: Tensor, inverse: Tensor, weights: Tensor | None) -> bool:
    return weights is not None and _fits(rows, source, inverse, weights)


combine.in_triton(_triton, invariant=True, supports=_fits, kernels=(combine_kernel,))
combine.in_triton(_Combine.apply, "triton with gradients", differentiable=True, supports=_weighted_fits)


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
