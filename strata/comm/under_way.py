"""An all-reduce in two operations, between which the ranks compute something else while the message travels."""

from __future__ import annotations

from torch import Tensor

from strata.comm import collectives, peer_copies
from strata.comm.collectives import Pending
from strata.comm.mesh import Axis
from strata.comm.operations import Along, all_reduce, live
from strata.comm.peer_copies import PendingSum
from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import ATEN, NCCL, operation


def _start_cost(x: Tensor, along: Along | Axis, part: int, *, workload: Workload) -> Cost:
    return all_reduce.cost(x, along, workload=workload)


def _start_meta(x: Tensor, along: Along | Axis, part: int) -> Pending:
    return Pending(all_reduce.meta(x, along))


@operation(_start_cost, meta=_start_meta, mutates=("x",), collective=True)
def start_all_reduce(x: Tensor, along: Along | Axis, part: int) -> Pending:
    """Begin with the sum of x over the ranks, which `finish_all_reduce` gives.

    x: contiguous, and lost: the sum may come into its memory, so nothing may read or write it any more. part: of
    messages that are under way together each has its own, from 0 on; of a part the one before it is finished.
    """
    return Pending(all_reduce.reference(x, along))


def _start_by_library(x: Tensor, axis: Axis, part: int) -> Pending:
    """On a GPU NCCL has a stream of its own, which begins once this one has come so far. x is kept until the end, where
    this stream waits, so its memory goes to nobody else before that.
    """
    return Pending(x) if axis.size == 1 else collectives.start_all_reduce(x, live(axis))


def _start_by_copies(x: Tensor, axis: Axis, part: int) -> PendingSum:
    assert axis.copies is not None
    return axis.copies.start(x, part)


start_all_reduce.implement("gloo", "cpu")(_start_by_library)
start_all_reduce.implement("copy engine", "cuda", supports=peer_copies.fits, kernels=(ATEN,))(_start_by_copies)
start_all_reduce.implement("nccl", "cuda", kernels=(NCCL,))(_start_by_library)


def _finish_cost(pending: Pending, *, workload: Workload) -> Cost:
    return Cost()  # what it waits for is counted where it begins


def _finish_meta(pending: Pending) -> Tensor:
    return pending.result


@operation(_finish_cost, meta=_finish_meta)
def finish_all_reduce(pending: Pending | PendingSum) -> Tensor:
    """The sum that `start_all_reduce` began with, of the shape and dtype of its x."""
    return pending.wait()


for _kind in ("cpu", "cuda"):
    finish_all_reduce.implement("wait", _kind, kernels=())(finish_all_reduce.reference)
