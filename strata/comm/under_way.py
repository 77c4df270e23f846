"""An all-reduce in two operations, between which ranks compute something else; the second can take up a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from strata.comm import collectives, peer_copies
from strata.comm.collectives import Pending
from strata.comm.mesh import Axis
from strata.comm.operations import Along, all_reduce, by_library, live
from strata.comm.peer_copies import PendingSum
from strata.hardware.roofline import Cost, Workload
from strata.kernels.norm.norm import add_rms_norm, alike, fits, launch_norm, rms_norm_kernel
from strata.kernels.op import operation


def _start_cost(x: Tensor, along: Along | Axis, slot: int, *, workload: Workload) -> Cost:
    return all_reduce.cost(x, along, workload=workload)


def _start_meta(x: Tensor, along: Along | Axis, slot: int) -> Pending:
    return Pending(all_reduce.meta(x, along))


@operation(_start_cost, meta=_start_meta, mutates=("x",), collective=True)
def start_all_reduce(x: Tensor, along: Along | Axis, slot: int) -> Pending:
    """Begin with the sum of x over the ranks, which `finish_all_reduce` gives.

    x: contiguous, and lost: the sum may come into its memory, so nothing may read or write it any more. slot: where
    it travels to, which must be free (see `PeerCopies`).
    """
    return Pending(all_reduce.reference(x, along))


def _start_by_library(x: Tensor, axis: Axis, slot: int) -> Pending:
    """On a GPU NCCL has a stream of its own, which begins once this one has come so far. x is kept until the end, where
    this stream waits, so its memory goes to nobody else before that.
    """
    return Pending(x) if axis.size == 1 else collectives.start_all_reduce(x, live(axis))


def _start_by_copies(x: Tensor, axis: Axis, slot: int) -> PendingSum:
    assert axis.copies is not None
    return axis.copies.start(x, slot)


start_all_reduce.implement("copy engine", "cuda", supports=peer_copies.fits)(_start_by_copies)
by_library(start_all_reduce, _start_by_library)


def _finish_cost(pending: Pending, *, workload: Workload) -> Cost:
    return Cost()  # what it waits for is counted where it begins


def _finish_meta(pending: Pending) -> Tensor:
    return pending.result


@operation(_finish_cost, meta=_finish_meta)
def finish_all_reduce(pending: Pending | PendingSum) -> Tensor:
    """The sum that `start_all_reduce` began with, of the shape and dtype of its x."""
    return pending.wait()


finish_all_reduce.by_definition("cpu", "cuda", name="wait", kernels=())


def _norm_cost(pending: Pending, residual: Tensor, weight: Tensor, eps: float, *, workload: Workload) -> Cost:
    return add_rms_norm.cost(pending.result, residual, weight, eps, workload=workload)


def _norm_meta(pending: Pending, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, normed = add_rms_norm.meta(pending.result, residual, weight, eps)
    return total, normed


@operation(_norm_cost, meta=_norm_meta)
def finish_add_rms_norm(
    pending: Pending | PendingSum, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of the sum that `start_all_reduce` began with and residual, for what is summed [rows, width]."""
    total, normed = add_rms_norm.reference(pending.wait(), residual, weight, eps)
    return total, normed


def _was_copied(pending: Any, residual: Tensor, weight: Tensor, eps: float) -> bool:
    x = pending.result
    return isinstance(pending, PendingSum) and x.dim() == 2 and alike(x, residual) and fits(x, weight, eps)


def _norm_of_received(pending: PendingSum, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    return launch_norm(pending.result, weight, eps, residual, received=pending.received())


def _norm_apart(kind: str) -> Callable[..., tuple[Tensor, Tensor]]:
    norm = add_rms_norm.bind(kind)

    def run(pending: Pending | PendingSum, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normed = norm(pending.wait(), residual, weight, eps)
        return total, normed

    return run


def _kernels_apart(pending: Pending, residual: Tensor, weight: Tensor, eps: float) -> tuple[str, ...]:
    return add_rms_norm.bind("cuda").launches(residual, residual, weight, eps)


finish_add_rms_norm.in_triton(_norm_of_received, "received", supports=_was_copied, kernels=(rms_norm_kernel,))
finish_add_rms_norm.implement("apart", "cpu")(_norm_apart("cpu"))
finish_add_rms_norm.implement("apart", "cuda", kernels=_kernels_apart)(_norm_apart("cuda"))
