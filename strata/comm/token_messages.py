"""Messages between ranks that divide the tokens of a step, as operations of a graph (see `strata.comm.operations`)."""

from __future__ import annotations

import torch
from torch import Tensor

from strata.comm import collectives
from strata.comm.cost import all_gather_cost
from strata.comm.mesh import Axis
from strata.comm.operations import Along, by_library, live
from strata.hardware.roofline import Cost, Workload
from strata.kernels.op import ATEN, NCCL, operation


def _cost_of(nbytes: int, along: Along | Axis) -> Cost:
    """Of `nbytes` of each rank."""
    if along.size == 1 or not nbytes:
        return Cost()
    result = nbytes * along.size
    return Cost(read=nbytes, written=result, messages=1, sent=all_gather_cost(result, along.size).bytes)


def _cost(x: Tensor, along: Along | Axis, *, workload: Workload) -> Cost:
    return _cost_of(x.nbytes, along)


def _meta(x: Tensor, along: Along | Axis) -> Tensor:
    return x.new_empty((along.size * x.shape[0], *x.shape[1:]), device="meta")


@operation(_cost, meta=_meta, collective=True)
def gather_tokens(x: Tensor, along: Along | Axis) -> Tensor:
    """The rows of all ranks, equally many of each, [tokens, ...] to [ranks * tokens, ...] in the order of the ranks.

    Without rows no message is sent.
    """
    if along.size == 1 or not x.numel():
        return x.new_empty((along.size * x.shape[0], *x.shape[1:])) if along.size > 1 else x
    return collectives.start_all_gather(x.contiguous(), live(along)).wait()


def _pair_cost(k: Tensor, along: Along | Axis, v: Tensor, *, workload: Workload) -> Cost:
    # Both are copied side by side first.
    packed = Cost(read=k.nbytes + v.nbytes, written=k.nbytes + v.nbytes) if along.size > 1 else Cost()
    return packed + _cost_of(k.nbytes + v.nbytes, along)


def _pair_meta(k: Tensor, along: Along | Axis, v: Tensor) -> tuple[Tensor, Tensor]:
    return _meta(k, along), _meta(v, along)


@operation(_pair_cost, meta=_pair_meta, collective=True)
def gather_keys_values(k: Tensor, along: Along | Axis, v: Tensor) -> tuple[Tensor, Tensor]:
    """`gather_tokens` of keys and of values [tokens, kv_heads, head_dim] in one message; the results are views of it,
    dense from the heads on."""
    if along.size == 1:
        return k, v
    keys, values = gather_tokens.reference(torch.stack((k, v), 1), along).unbind(1)
    return keys, values


by_library(gather_tokens, invariant=True)
by_library(gather_keys_values, kernels=(ATEN, NCCL), invariant=True)
