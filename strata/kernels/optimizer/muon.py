"""The elementwise ends of Muon (Jordan et al. 2024): momentum before, and the step after a matrix is orthogonalized."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


def _momentum_cost(
    result: Tensor, momentum: Tensor, gradient: Tensor, step: Tensor, beta: float, *, workload: Workload
) -> Cost:
    return Cost(7 * momentum.numel(), momentum.nbytes + gradient.nbytes, momentum.nbytes + result.nbytes)


@operation(_momentum_cost, mutates=("result", "momentum"))
def muon_momentum(result: Tensor, momentum: Tensor, gradient: Tensor, step: Tensor, beta: float) -> Tensor:
    """Nesterov momentum: momentum = beta * momentum + (1 - beta) * gradient, and the same once more into `result`.

    result: of any floating dtype. momentum: float32. Both, and gradient, are contiguous and of one shape. step [2]
    float32: learning rate, and what the gradient is multiplied by. If that factor is 0 the momentum stays and `result`
    is 0, whatever the gradient holds. Returns `result`.
    """
    factor = step[1]
    given = torch.where(factor != 0, gradient.to(momentum.dtype) * factor, 0)
    mean = momentum + (given - momentum) * (1 - beta)
    momentum.copy_(torch.where(factor != 0, mean, momentum))
    return result.copy_(torch.where(factor != 0, given + (mean - given) * beta, 0))


def _update_cost(
    weight: Tensor, master: Tensor, direction: Tensor, step: Tensor, size: float, decay: float, *, workload: Workload
) -> Cost:
    return Cost(
        4 * master.numel(), master.nbytes + direction.nbytes, master.nbytes + weight.nbytes, weights=master.nbytes
    )


@operation(_update_cost, mutates=("weight", "master"))
def muon_update(weight: Tensor, master: Tensor, direction: Tensor, step: Tensor, size: float, decay: float) -> Tensor:
    """One update, in place: decoupled weight decay, then a step of rate * size against `direction`.

    weight: what the model computes with, of any floating dtype, `master` rounded afterwards; or `master` itself.
    master: float32. direction: of any floating dtype. All are contiguous and of one shape. step: see `muon_momentum`;
    if its factor is 0 nothing changes. Returns `weight`.
    """
    rate, factor = step.unbind()
    value = master * (1 - rate * decay) - rate * size * direction.to(master.dtype)
    for held in (master, weight):
        held.copy_(torch.where(factor != 0, value, held))
    return weight


@jit
def muon_momentum_kernel(result, momentum, gradient, step, count, beta, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = offset < count
    factor = tl.load(step + 1)
    applied = held & (factor != 0)
    given = tl.load(gradient + offset, mask=applied, other=0.0).to(tl.float32) * factor
    mean = tl.load(momentum + offset, mask=applied, other=0.0)
    mean += (given - mean) * (1 - beta)
    given += (mean - given) * beta
    tl.store(momentum + offset, mean, mask=applied)
    tl.store(result + offset, given.to(result.dtype.element_ty), mask=held)


@jit
def muon_update_kernel(
    weight, master, direction, step, count, size, decay, BLOCK: tl.constexpr, SEPARATE: tl.constexpr
):
    """SEPARATE: whether `weight` is other memory than `master`."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rate = tl.load(step)
    held = (offset < count) & (tl.load(step + 1) != 0)
    value = tl.load(master + offset, mask=held)
    value = value * (1 - rate * decay) - rate * size * tl.load(direction + offset, mask=held).to(tl.float32)
    tl.store(master + offset, value, mask=held)
    if SEPARATE:
        tl.store(weight + offset, value.to(weight.dtype.element_ty), mask=held)


_BLOCK = 1024
_WARPS = 4


def _momentum_triton(result: Tensor, momentum: Tensor, gradient: Tensor, step: Tensor, beta: float) -> Tensor:
    count = momentum.numel()
    grid = (ceil_div(count, _BLOCK),)
    muon_momentum_kernel[grid](result, momentum, gradient, step, count, beta, BLOCK=_BLOCK, num_warps=_WARPS)
    return result


def _update_triton(
    weight: Tensor, master: Tensor, direction: Tensor, step: Tensor, size: float, decay: float
) -> Tensor:
    count, separate = master.numel(), weight.data_ptr() != master.data_ptr()
    muon_update_kernel[(ceil_div(count, _BLOCK),)](
        weight, master, direction, step, count, size, decay, BLOCK=_BLOCK, SEPARATE=separate, num_warps=_WARPS
    )
    return weight


def _momentum_fits(result: Tensor, momentum: Tensor, gradient: Tensor, step: Tensor, beta: float) -> bool:
    return momentum.dtype == torch.float32 and all(one.is_contiguous() for one in (result, momentum, gradient))


def _update_fits(weight: Tensor, master: Tensor, direction: Tensor, *others: object) -> bool:
    return master.dtype == torch.float32 and all(one.is_contiguous() for one in (weight, master, direction))


muon_momentum.in_triton(_momentum_triton, supports=_momentum_fits)
muon_update.in_triton(_update_triton, supports=_update_fits)
