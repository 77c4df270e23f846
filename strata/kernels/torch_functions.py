"""Functions of torch that stand in graphs beside operations: what they return and cost.

Shapes are given by hand: calling them on the meta device would import a second's worth of torch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import Operation

_Pair = tuple[int, int]


def _sum(left: Tensor, right: Tensor) -> Tensor:
    # Which imports symbolic algebra, for half a second.
    shape = left.shape if left.shape == right.shape else torch.broadcast_shapes(left.shape, right.shape)
    return torch.empty(shape, dtype=torch.promote_types(left.dtype, right.dtype), device="meta")


def _sum_cost(left: Tensor, right: Tensor, *, workload: Workload) -> Cost:
    result = _sum(left, right)
    return Cost(flops=result.numel(), read=left.nbytes + right.nbytes, written=result.nbytes)


def _sum_backward_cost(left: Tensor, right: Tensor, *, workload: Workload) -> Cost:
    return Cost()  # the gradient of a sum is that of both


def _rows(source: Tensor, dim: int, rows: Tensor) -> Tensor:
    return source.new_empty((len(rows), *source.shape[1:]), device="meta")


def _rows_cost(source: Tensor, dim: int, rows: Tensor, *, workload: Workload) -> Cost:
    gathered = _rows(source, dim, rows).nbytes
    return Cost(read=rows.nbytes + gathered, written=gathered)


def _put_cost(target: Tensor, indices: tuple[Tensor], values: Tensor, *, workload: Workload) -> Cost:
    return Cost(read=values.nbytes + indices[0].nbytes, written=values.nbytes)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]), device="meta")


def _joined_cost(parts: list[Tensor], *, workload: Workload) -> Cost:
    moved = sum(part.nbytes for part in parts)
    return Cost(read=moved, written=moved)


def _converted(source: Tensor, dtype: torch.dtype) -> Tensor:
    return source if source.dtype == dtype else source.new_empty(source.shape, dtype=dtype, device="meta")


def _converted_cost(source: Tensor, dtype: torch.dtype, *, workload: Workload) -> Cost:
    return Cost(read=source.nbytes, written=source.numel() * dtype.itemsize)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, stride: _Pair, padding: _Pair, *more: Any) -> Tensor:
    dilation = more[0] if more else (1, 1)
    sizes = (
        (size + 2 * pad - step * (width - 1) - 1) // jump + 1
        for size, width, jump, pad, step in zip(x.shape[-2:], weight.shape[-2:], stride, padding, dilation, strict=True)
    )
    return x.new_empty((*x.shape[:-3], weight.shape[0], *sizes), device="meta")


def _convolution_cost(x: Tensor, weight: Tensor, bias: Tensor | None, *shape: Any, workload: Workload) -> Cost:
    result = _convolved(x, weight, bias, *shape)
    weights = weight.nbytes + (0 if bias is None else bias.nbytes)
    flops = result.numel() * (2 * weight[0].numel() + (bias is not None))
    return Cost(flops=flops, read=x.nbytes + weights, written=result.nbytes, weights=weights)


def _batch_norm_cost(x: Tensor, mean: Tensor, variance: Tensor, *, workload: Workload) -> Cost:
    # By running statistics: a scale and a shift of each channel.
    return Cost(flops=2 * x.numel(), read=x.nbytes + 4 * mean.nbytes, written=x.nbytes)


add = Operation("add", operator.add, _sum_cost, _sum, backward=_sum_backward_cost)

# By what a node of a graph calls. They are in no registry: torch alone runs them.
TORCH_FUNCTIONS: dict[Any, Operation] = {
    operator.add: add,
    torch.index_select: Operation("index_select", torch.index_select, _rows_cost, _rows),
    torch.cat: Operation("cat", torch.cat, _joined_cost, _joined),
    torch.conv2d: Operation("conv2d", torch.conv2d, _convolution_cost, _convolved),
    F.batch_norm: Operation("batch_norm", F.batch_norm, _batch_norm_cost, lambda x, *_: x),
    "to": Operation("to", Tensor.to, _converted_cost, _converted),
    "index_put_": Operation("index_put_", Tensor.index_put_, _put_cost, lambda target, *_: target),
}
