"""Products whose tensor-parallel messages travel while they are computed (Wang et al. 2022): a ring of chunks.

With sequence parallelism each rank holds a chunk of the tokens. Instead of gathering all of them and then multiplying,
a rank multiplies the chunk it has while the next one arrives; instead of multiplying everything and then summing over
the ranks, it adds the chunk of a product to the sum that passes by.
"""

# The apply of an autograd function is untyped in torch.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from strata.comm.collectives import start_all_gather, start_shift
from strata.comm.mesh import Axis


def products_of_gathered(x: Tensor, weights: Sequence[Tensor], axis: Axis) -> tuple[Tensor, ...]:
    """`all_gather(x, axis, 0) @ weight^T` for every weight.

    x [tokens of this rank, inputs], equally many on all ranks; weights [outputs of this rank, inputs] -> each
    [tokens, outputs of this rank].
    """
    return _ProductsOfGathered.apply(x, axis, *weights)


def scattered_product(x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
    """`reduce_scatter(x @ weight^T, axis, 0)`.

    x [tokens, inputs of this rank], a multiple of the ranks; weight [outputs, inputs of this rank] -> [tokens of this
    rank, outputs].
    """
    return _ScatteredProduct.apply(x, weight, axis)


def arriving_chunks(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """The chunks of all ranks with their number, this rank's first; the next is under way while one is used."""
    for step in range(axis.size):
        following = start_shift(x, axis) if step + 1 < axis.size else None
        yield (axis.index - step) % axis.size, x
        if following is not None:
            x = following.wait()


def _sum_passing_by(part: Callable[[int], Tensor], axis: Axis) -> Tensor:
    """The sum over the ranks of their `part` of this rank's chunk. Each sum ends on the rank of its chunk's number."""
    total = part((axis.index - 1) % axis.size)
    for step in range(2, axis.size + 1):
        passing = start_shift(total, axis)
        own = part((axis.index - step) % axis.size)
        total = own.add_(passing.wait())
    return total


class _ProductsOfGathered(torch.autograd.Function):
    """Keeps this rank's chunk alone; the backward pass gathers the others once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = axis
        ctx.save_for_backward(x, *weights)
        made = tuple(x.new_empty(axis.size * x.shape[0], weight.shape[0]) for weight in weights)
        for number, chunk in arriving_chunks(x, axis):
            for product, weight in zip(made, weights, strict=True):
                torch.mm(chunk, weight.t(), out=_chunk(product, number, axis))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis: Axis = ctx.axis
        x, *weights = ctx.saved_tensors
        gathering = start_all_gather(x, axis) if any(ctx.needs_input_grad[2:]) else None

        def of_chunk(number: int) -> Tensor:
            total = _chunk(grads[0], number, axis) @ weights[0]
            for gradient, weight in zip(grads[1:], weights[1:], strict=True):
                total.addmm_(_chunk(gradient, number, axis), weight)
            return total

        of_x = _sum_passing_by(of_chunk, axis)
        if gathering is None:  # the weights are frozen
            return of_x, None, *(None for _ in grads)
        whole = gathering.wait()
        return of_x, None, *(gradient.t() @ whole for gradient in grads)


class _ScatteredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(x, weight)
        return _sum_passing_by(lambda number: _chunk(x, number, axis) @ weight.t(), axis)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        axis: Axis = ctx.axis
        x, weight = ctx.saved_tensors
        of_x = torch.empty_like(x)
        whole = grads[0].new_empty(x.shape[0], weight.shape[0])
        for number, chunk in arriving_chunks(grads[0].contiguous(), axis):
            torch.mm(chunk, weight, out=_chunk(of_x, number, axis))
            _chunk(whole, number, axis).copy_(chunk)
        return of_x, whole.t() @ x if ctx.needs_input_grad[1] else None, None


def _chunk(x: Tensor, number: int, axis: Axis) -> Tensor:
    rows = x.shape[0] // axis.size
    return x[number * rows : (number + 1) * rows]
