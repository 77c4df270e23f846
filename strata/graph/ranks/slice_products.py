"""In deterministic graphs, products whose width ranks divide are summed in one order, whatever the number of ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from math import gcd

import torch
from torch import fx

from strata.comm.operations import pairwise_all_reduce
from strata.comm.placement import Placement
from strata.graph.rewrite import follow
from strata.graph.trace import operation_of
from strata.kernels.linear.linear import MAX_SLICES, linear, sliced_linear


def slice_products(graph: fx.GraphModule, placements: Mapping[str, Placement], ranks: int) -> fx.GraphModule:
    """Let products with a ROW weight be `sliced_linear`, in place; returns `graph`.

    graph: of one of `ranks` ranks, which `shard` has gone over (one rank's need not have been) and no other pass.
    Parts stay float32 until they are summed over the ranks, pairwise too, and are rounded once. So 1, 2, 4 and 8 ranks
    get the same bits; other numbers of ranks get bits of their own.
    """
    for node in list(graph.graph.nodes):
        if node.target is linear and _is_row(node.args[1], placements):
            _slice(graph, node, ranks)
    graph.recompile()
    return graph


def _is_row(weight: fx.Node, placements: Mapping[str, Placement]) -> bool:
    return any(placements[name] is Placement.ROW for name in weight.meta.get("parameters", ()))


def _slice(graph: fx.GraphModule, node: fx.Node, ranks: int) -> None:
    x, weight, *rest = node.args
    assert isinstance(weight, fx.Node)
    parameter = graph.get_parameter(str(weight.target))
    slices = max(1, gcd(MAX_SLICES, parameter.shape[1] * ranks) // ranks)
    bias = rest[0] if rest else None
    node.target, node.args = sliced_linear, (x, weight, slices, ranks > 1)
    last = node
    if ranks > 1:
        last = _sum_of(node)
        if ranks > 2:  # of two, any sum is pairwise, and there are faster ones
            last.target = pairwise_all_reduce
        if parameter.dtype.itemsize < torch.float32.itemsize:
            last = follow(last, "to", parameter.dtype)
    if bias is not None:
        follow(last, operator.add, bias)


def _sum_of(node: fx.Node) -> fx.Node:
    """What adds a rank's part to the others', which `shard` has put behind it."""
    (reader,) = node.users
    operation = operation_of(reader)
    assert operation is not None
    assert operation.collective
    return reader
