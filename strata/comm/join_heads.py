"""What ranks that divide keys by sequence have found for the queries of all, as one result: an operation of a graph.

Parts of a softmax join by the logarithms of their sums of exponentials (Milakov and Gimelshein 2018), so each rank
sends every other what it has found for that one's heads, and those logarithms beside it. See `strata.comm.operations`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strata.comm import collectives
from strata.comm.cost import all_to_all_cost
from strata.comm.mesh import Axis
from strata.comm.operations import Along, by_library, live
from strata.hardware.roofline import Cost, Workload
from strata.kernels.collective.joined_heads import join_heads_kernel, pack_heads, pack_heads_kernel, unpack_heads
from strata.kernels.op import ATEN, NCCL, operation


def _cost(mixed: Tensor, along: Along | Axis, sums: Tensor, dtype: torch.dtype, *, workload: Workload) -> Cost:
    given, own = mixed.nbytes + sums.nbytes, mixed.numel() // along.size
    if along.size == 1 or not given:
        return Cost(read=given, written=own * dtype.itemsize)
    # Packed, sent, and joined: a weight for each head of each rank, with which its elements are multiplied and added.
    flops = 2 * mixed.numel() + 4 * sums.numel()
    sent = all_to_all_cost(given, along.size)
    return Cost(flops, read=3 * given, written=2 * given + own * dtype.itemsize, messages=1, sent=sent.bytes)


def _meta(mixed: Tensor, along: Along | Axis, sums: Tensor, dtype: torch.dtype) -> Tensor:
    tokens, heads, dim = mixed.shape
    return mixed.new_empty(
        (tokens, collectives.shard_size(heads, along.size, along.name), dim), dtype=dtype, device="meta"
    )


@operation(_cost, meta=_meta, rowwise=True, collective=True)
def join_heads(mixed: Tensor, along: Along | Axis, sums: Tensor, dtype: torch.dtype) -> Tensor:
    """This rank's heads of the average over the keys of all ranks, [tokens, heads / ranks, head_dim] in `dtype`.

    mixed: [tokens, heads, head_dim] float32 (or float64), for each query the average over this rank's keys; sums:
    [tokens, heads] in that dtype, the log of the sum of the exponentials of its scores, -inf where it saw none (see
    `dcp_attention`). The heads are those of all ranks, one rank's after another. Zeros where no rank saw a key.
    Without tokens no message is sent. Raises ValueError if the heads are no multiple of the number of ranks.
    """
    ranks, (tokens, _, dim) = along.size, mixed.shape
    packed = torch.cat((mixed, sums[..., None]), -1)
    parts = packed.unflatten(1, (ranks, collectives.shard_size(mixed.shape[1], ranks, along.name))).transpose(0, 1)
    if ranks > 1 and tokens:
        received = collectives.start_all_to_all(parts.reshape(ranks * tokens, -1), live(along)).wait()
        parts = received.view(ranks, tokens, -1, dim + 1)
    return joined(parts[..., :dim], parts[..., dim]).to(dtype)


def joined(mixed: Tensor, sums: Tensor) -> Tensor:
    """Averages over parts of the keys [parts, ..., head_dim] and their logarithms [parts, ...] -> [..., head_dim]."""
    largest = sums.amax(0)
    weights = (sums - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    total = weights.sum(0)
    return (weights[..., None] * mixed).sum(0) / total.masked_fill(total == 0.0, 1.0)[..., None]


def _supports(mixed: Tensor, along: Along | Axis, sums: Tensor, dtype: torch.dtype) -> bool:
    return mixed.dtype == torch.float32 and mixed.is_contiguous() and mixed.numel() > 0


def _scratch(mixed: Tensor, along: Along | Axis, sums: Tensor, dtype: torch.dtype) -> int:
    """What is packed, and what has arrived."""
    return 2 * (mixed.nbytes + sums.nbytes)


def _by_kernels(mixed: Tensor, axis: Axis, sums: Tensor, dtype: torch.dtype) -> Tensor:
    packed = pack_heads(mixed, sums, axis.size)
    received = collectives.start_all_to_all(packed, live(axis)).wait()
    return unpack_heads(received, mixed.shape[2], dtype)


_kernels = pack_heads_kernel, NCCL, join_heads_kernel
join_heads.in_triton(_by_kernels, invariant=True, supports=_supports, kernels=_kernels, scratch=_scratch)
by_library(join_heads, kernels=(ATEN, NCCL, ATEN), invariant=True)
