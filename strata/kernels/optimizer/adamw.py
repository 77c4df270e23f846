"""AdamW (Loshchilov and Hutter 2019) in one pass: masters, both moments, and the weights that the model uses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strata.hardware.roofline import Cost, Workload
from strata.kernels.grid_sizes import ceil_div
from strata.kernels.op import operation
from strata.kernels.triton_import import jit, tl


class Constants(NamedTuple):
    """What a run keeps of one group of weights: decay rates of both moments, epsilon, decoupled weight decay."""

    beta1: float
    beta2: float
    eps: float
    decay: float


def _cost(
    weight: Tensor, master: Tensor, first: Tensor, second: Tensor, gradient: Tensor, *others: object, workload: Workload
) -> Cost:
    state = master.nbytes + first.nbytes + second.nbytes
    return Cost(16 * master.numel(), state + gradient.nbytes, state + weight.nbytes, master.nbytes)


@operation(_cost, mutates=("weight", "master", "first", "second"))
def adamw(
    weight: Tensor, master: Tensor, first: Tensor, second: Tensor, gradient: Tensor, step: Tensor, constants: Constants
) -> Tensor:
    """One update, in place. Returns `weight`, which is `master` rounded afterwards.

    weight: what the model computes with, of any floating dtype; `master` itself if the model has that precision.
    master, first, second: the weights and the two moments, float32 and of one shape with weight and gradient; all
    contiguous. step [4] float32: learning rate, 1 - beta1^t, 1 - beta2^t, and what the gradient is multiplied by
    (clipping); on the device, so that a captured step reads them anew. If that factor is 0 nothing changes, whatever
    the gradient holds.
    """
    rate, correction1, correction2, factor = step.unbind()
    beta1, beta2, eps, decay = constants
    is_applied = factor != 0
    given = gradient.to(master.dtype) * factor
    mean = first + (given - first) * (1 - beta1)
    square = second * beta2 + given.square() * (1 - beta2)
    value = master * (1 - rate * decay) - rate / correction1 * mean / ((square / correction2).sqrt() + eps)
    for held, new in ((first, mean), (second, square), (master, value), (weight, value)):
        held.copy_(torch.where(is_applied, new, held))
    return weight


@jit
def adamw_kernel(
    weight,
    master,
    first,
    second,
    gradient,
    step,
    count,
    beta1,
    beta2,
    eps,
    decay,
    BLOCK: tl.constexpr,
    SEPARATE: tl.constexpr,
):
    """SEPARATE: whether `weight` is other memory than `master`."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rate, factor = tl.load(step), tl.load(step + 3)
    correction1, correction2 = tl.load(step + 1), tl.load(step + 2)
    # A step that is skipped neither reads nor writes.
    held = (offset < count) & (factor != 0)
    given = tl.load(gradient + offset, mask=held).to(tl.float32) * factor
    value = tl.load(master + offset, mask=held)
    mean = tl.load(first + offset, mask=held)
    square = tl.load(second + offset, mask=held)
    mean += (given - mean) * (1 - beta1)
    square = square * beta2 + given * given * (1 - beta2)
    value = value * (1 - rate * decay) - rate / correction1 * mean / (tl.sqrt(square / correction2) + eps)
    tl.store(first + offset, mean, mask=held)
    tl.store(second + offset, square, mask=held)
    tl.store(master + offset, value, mask=held)
    if SEPARATE:
        tl.store(weight + offset, value.to(weight.dtype.element_ty), mask=held)


_BLOCK = 1024
_WARPS = 8


def _triton(
    weight: Tensor, master: Tensor, first: Tensor, second: Tensor, gradient: Tensor, step: Tensor, constants: Constants
) -> Tensor:
    count = weight.numel()
    adamw_kernel[(ceil_div(count, _BLOCK),)](
        weight,
        master,
        first,
        second,
        gradient,
        step,
        count,
        *constants,
        BLOCK=_BLOCK,
        SEPARATE=weight.data_ptr() != master.data_ptr(),
        num_warps=_WARPS,
    )
    return weight


def _fits(weight: Tensor, master: Tensor, first: Tensor, second: Tensor, gradient: Tensor, *others: object) -> bool:
    wide = all(state.dtype == torch.float32 for state in (master, first, second))
    return wide and _are_contiguous(weight, master, first, second, gradient)


def _are_contiguous(*tensors: Tensor) -> bool:
    return all(one.is_contiguous() for one in tensors)


# Elements of a scaled gradient that a CPU's cache holds until it has been used.
_CPU_BLOCK = 1 << 16


def _fused_fits(
    weight: Tensor, master: Tensor, first: Tensor, second: Tensor, gradient: Tensor, *others: object
) -> bool:
    return master.dtype == first.dtype == second.dtype and _are_contiguous(weight, master, first, second, gradient)


@adamw.implement("torch fused", "cpu", supports=_fused_fits)
def _fused(
    weight: Tensor, master: Tensor, first: Tensor, second: Tensor, gradient: Tensor, step: Tensor, constants: Constants
) -> Tensor:
    rate, correction1, correction2, factor = step.tolist()
    if factor == 0:
        return weight
    beta1, beta2, eps, decay = constants
    root = correction2**0.5
    settings = {"lr": rate * root / correction1, "eps": eps * root, "weight_decay": decay * correction1 / root}
    settings |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False}
    # After endless steps torch corrects nothing: rate, eps and decay have the corrections.
    steps = [torch.full((), torch.inf)]
    is_ready = factor == 1 and gradient.dtype == master.dtype
    block = max(1, master.numel()) if is_ready else _CPU_BLOCK
    for held in zip(*(one.view(-1).split(block) for one in (master, gradient, first, second)), strict=True):
        value, given, mean, square = held
        scaled = given if is_ready else given.to(master.dtype) * factor
        torch._fused_adamw_([value], [scaled], [mean], [square], [], steps, **settings)
    if weight.data_ptr() != master.data_ptr():
        weight.copy_(master)
    return weight


adamw.in_triton(_triton, supports=_fits)
