"""An all-reduce whose sum is a tree: what some ranks add up first is a branch of what fewer ranks add up alone."""

from __future__ import annotations

from torch import Tensor

from strata.comm import collectives
from strata.comm.mesh import Axis
from strata.comm.operations import Along, all_reduce, live
from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import ATEN, NCCL, operation
from strata.kernels.pairwise import pairwise_sum


def _cost(x: Tensor, along: Along | Axis, *, workload: Workload) -> Cost:
    return all_reduce.cost(x, along, workload=workload)


@operation(_cost, rowwise=True, collective=True)
def pairwise_all_reduce(x: Tensor, along: Along | Axis) -> Tensor:
    """`all_reduce` of float32 or float64, added up pairwise instead of one rank after the other.

    Of two ranks both are the same sum. Of more, this one has the bits of a sum over halves or quarters of the ranks,
    each of which holds what several hold here (`strata.kernels.pairwise`).
    """
    if along.size == 1:
        return x
    parts = collectives.start_all_gather(x.contiguous().unsqueeze(0), live(along)).wait()
    return pairwise_sum(list(parts))


pairwise_all_reduce.implement("gathered", "cpu", invariant=True)(pairwise_all_reduce.reference)
pairwise_all_reduce.implement("gathered", "cuda", invariant=True, kernels=(NCCL, ATEN))(pairwise_all_reduce.reference)
