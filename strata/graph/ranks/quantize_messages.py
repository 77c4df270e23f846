"""Sums over ranks in 8 bits: what products and experts make of many rows travels rounded, there and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from strata.comm.operations import Along, all_reduce, all_to_all, reduce_scatter
from strata.comm.token_messages import gather_tokens
from strata.graph.rewrite import chain
from strata.graph.trace import operation_of
from strata.kernels.collective.quantized_shards import dequantize_shards, quantize_shards, sum_shards


def quantize_messages(graph: fx.GraphModule, along: Along, width: int, dtype: torch.dtype) -> fx.GraphModule:
    """Let what ranks add up behind products and experts travel in e4m3; in place, before the graph is bound; returns
    `graph`.

    graph: of a step of many rows, of a rank along `along`, before messages are fused. width, dtype: of what is summed.

        all_reduce  ->  quantize_shards, all_to_all, sum_shards, gather_tokens, dequantize_shards

    Each rank rounds its rows, gets from all what they have of its part of the columns, adds that up in float32 in the
    order of the ranks, and rounds the sum, which goes to all: so all have the same bits. For x_r of the ranks, A_r the
    largest magnitude of x_r in a group of 128 columns, the result is off by at most

        0.129 sum_r |x_r| + 2^-16 sum_r A_r

    and the rounding to dtype: half a unit of e4m3 (2^-4, or 2^-17 of the group's largest) of each x_r, and again of
    their sum. Other sums stay: of embeddings, of which one rank has each, of mean squares, and of the few rows behind
    the last attention. Raises ValueError if the ranks do not divide the width evenly.
    """
    check_width(width, along.size)
    nodes = list(graph.graph.nodes)
    _, *rows = (node for node in nodes if node.op == "placeholder")
    kept = [user for given in rows for user in given.users]
    many = nodes[: min(map(nodes.index, kept), default=len(nodes))]
    for node in many:
        if operation_of(node) is all_reduce and node.args[1] == along and is_made_of_weights(node.args[0]):
            part = width // along.size
            there = (quantize_shards, along.size), (all_to_all, along), (sum_shards, part)
            chain(node, *there, (gather_tokens, along), (dequantize_shards, part, dtype))
    graph.recompile()
    return graph


def check_width(width: int, ranks: int) -> None:
    if width % ranks:
        raise ValueError(
            f"message_dtype='fp8' gives each rank a part of the columns that are added up, and "
            f"tensor_parallel_size={ranks} does not divide hidden_size = {width}; leave it out"
        )


def is_made_of_weights(summed: Any) -> bool:
    """Whether products or experts make it, of which ranks may have added up a part."""
    made = operation_of(summed)
    if made is reduce_scatter:
        return is_made_of_weights(summed.args[0])
    return made is not None and (made.product or made.mixture)
