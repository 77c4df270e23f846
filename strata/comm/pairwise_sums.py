"""An all-reduce whose sum is a tree: what some ranks add up first is a branch of what fewer ranks add up alone."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.comm import collectives
from strata.comm.mesh import Axis
from strata.comm.operations import Along, all_reduce, live
from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import ATEN, NCCL, operation
from strata.kernels.pairwise import pairwise_sum

# What the parts of all ranks may take at once: a long prompt's would take gigabytes.
_GATHERED_BYTES = 64 << 20


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
    axis, result = live(along), torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = max(1, _GATHERED_BYTES * len(x) // max(1, along.size * x.nbytes))
    for some, summed in zip(x.split(rows), result.split(rows), strict=True):
        parts = collectives.start_all_gather(some.contiguous().unsqueeze(0), axis).wait()
        summed.copy_(pairwise_sum(list(parts)))
    return result


pairwise_all_reduce.implement("gathered", "cpu", invariant=True)(pairwise_all_reduce.reference)
pairwise_all_reduce.implement("gathered", "cuda", invariant=True, kernels=(NCCL, ATEN))(pairwise_all_reduce.reference)
