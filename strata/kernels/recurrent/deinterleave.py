"""Columns that stand group by group, brought together part by part, as a convolution and its state keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import next_power_of_2
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


def _cost(x: Tensor, parts: tuple[int, ...], *, workload: Workload) -> Cost:
    return Cost(read=x.nbytes, written=x.nbytes)


def _meta(x: Tensor, parts: tuple[int, ...]) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * x.shape[2], device="meta")


@operation(_cost, meta=_meta, rowwise=True)
def deinterleave(x: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Of [tokens, groups, columns] the first part of all groups, then the second of all, ...: [tokens, groups *
    columns].

    parts: columns of each, which add up to all. So transformers' Qwen3NextGatedDeltaNet reads its products, in which
    the queries, keys, values and gates of a key head stand together.
    """
    return torch.cat([part.flatten(-2) for part in x.split(parts, -1)], -1)


@jit
def _copy(source, target, group, groups, START: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    if SIZE > 0:
        column = tl.arange(0, BLOCK)
        held = column < SIZE
        value = tl.load(source + START + column, mask=held)
        tl.store(target + groups * START + group * SIZE + column, value, mask=held)


@jit
def deinterleave_kernel(
    x,
    result,
    token_stride,
    group_stride,
    groups,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    FOURTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs [tokens, groups]: all parts of one group, of so many columns each, 0 for none."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    source = x + token * token_stride + group * group_stride
    target = result + token * groups * (FIRST + SECOND + THIRD + FOURTH)
    _copy(source, target, group, groups, 0, FIRST, BLOCK)
    _copy(source, target, group, groups, FIRST, SECOND, BLOCK)
    _copy(source, target, group, groups, FIRST + SECOND, THIRD, BLOCK)
    _copy(source, target, group, groups, FIRST + SECOND + THIRD, FOURTH, BLOCK)


def _constants(parts: tuple[int, ...]) -> dict[str, int]:
    names = ("FIRST", "SECOND", "THIRD", "FOURTH")
    sizes = dict(zip(names, (*parts, 0, 0, 0, 0), strict=False))
    return sizes | {"BLOCK": next_power_of_2(max(parts))}


def _triton(x: Tensor, parts: tuple[int, ...]) -> Tensor:
    tokens, groups, columns = x.shape
    result = torch.empty(tokens, groups * columns, dtype=x.dtype, device=x.device)
    if result.numel():
        grid, constants = (tokens, groups), _constants(parts)
        deinterleave_kernel[grid](x, result, x.stride(0), x.stride(1), groups, **constants, num_warps=1)
    return result


def _fits(x: Tensor, parts: tuple[int, ...]) -> bool:
    return 1 <= len(parts) <= 4 and max(parts) <= 4096 and x.stride(2) == 1


deinterleave.in_triton(_triton, invariant=True, supports=_fits, kernels=(deinterleave_kernel,))
deinterleave.by_definition("cpu", "cuda", invariant=True, differentiable=True)
