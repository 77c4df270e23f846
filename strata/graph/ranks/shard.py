"""A traced graph becomes one rank's: where ranks divide the parameters, collectives put the parts together."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, fx

from strata.comm.experts.rows import combine_rows, dispatch_rows
from strata.comm.operations import Along, all_reduce
from strata.comm.placement import ExpertSlots, Placement
from strata.graph.rewrite import fetch, follow, insert_after, insert_before
from strata.graph.trace import operation_of
from strata.kernels.linear.embedding import embedding, vocabulary_embedding
from strata.kernels.moe.experts import biased_experts, local_experts
from strata.kernels.norm.norm import mean_square, sharded_rms_norm, wide_rms_norm
from strata.kernels.op import Operation
from strata.kernels.recurrent.gated_norm import gated_mean_square, gated_rms_norm, sharded_gated_rms_norm


def shard(
    graph: fx.GraphModule,
    placements: Mapping[str, Placement],
    along: Along,
    index: int,
    slots: ExpertSlots | None = None,
    turns: Tensor | None = None,
    *,
    attention_dp: bool = False,
) -> fx.GraphModule:
    """Put the messages between the ranks along `along` into the graph of rank `index`, in place; returns `graph`.

    graph: captured from the rank's own model and not rewritten by a pass yet. placements: of every parameter that it
    fetches, by name. slots: where this rank's experts are among those of all ranks; None: each rank has a part of every
    expert. turns: [layers, experts, period] int32 on the device that runs the graph, of each layer the `placement` of
    `local_experts`, read anew in every call; None: each slot has the expert of its number. attention_dp: each rank has
    tokens of its own, as many as the others, and all else than experts whole.

    - After a product with a ROW weight, and after what EXPERT weights make: an all-reduce. The bias of the product is
      added to the sum, once. With `slots` the rank computes the choices of its own experts alone. With `attention_dp`
      the rows of all ranks come before the router (`dispatch_rows`), which so all ranks run on all rows, and sums go
      back to the rank whose rows they are of (`combine_rows`).
    - Rows of a VOCABULARY table: zeros for ids of other ranks, then an all-reduce.
    - Before a norm, gated or not, with DIVIDED_NORM weights: an all-reduce of the mean squares of each rank's columns.
    - Logits by VOCABULARY rows stay the rank's own, [rows, its ids].

    What reads other parameters stays: the rank's model holds its own heads and columns. Raises ValueError for a
    parameter without a placement, and for a divided one that is read by an operation of which it is not known how its
    parts make the whole.
    """
    if along.size == 1:
        return graph
    ranks = _Ranks(along, index, slots, turns, attention_dp)
    for node in list(graph.graph.nodes):
        operation = operation_of(node)
        if operation is not None:
            _shard_node(graph, node, operation, _read(node, placements), ranks)
    graph.recompile()
    return graph


class _Ranks(NamedTuple):
    """What the graph has to know of its ranks."""

    along: Along
    rank: int
    slots: ExpertSlots | None
    turns: Tensor | None
    attention_dp: bool


def _read(node: fx.Node, placements: Mapping[str, Placement]) -> dict[Placement, fx.Node]:
    """The parameters that a node reads, one of each placement."""
    found = {}
    for source in node.all_input_nodes:
        for name in source.meta.get("parameters", ()):
            if name not in placements:
                raise ValueError(
                    f"parameter {name!r} has no placement; give it one in the sharding table of its family"
                )
            found[placements[name]] = source
    return found


def _shard_node(
    graph: fx.GraphModule, node: fx.Node, operation: Operation, read: dict[Placement, fx.Node], ranks: _Ranks
) -> None:
    if Placement.ROW in read:
        _require(operation.product and node.args[1] is read[Placement.ROW], node, read[Placement.ROW])
        _sum_product(node, ranks)
    elif Placement.EXPERT in read and operation is biased_experts:
        _require(ranks.slots is None, node, read[Placement.EXPERT])
        node.args = (*node.args, ranks.rank == 0)  # the bias of the last products is added once
        follow(node, all_reduce, ranks.along)
    elif Placement.EXPERT in read:
        if ranks.slots is not None:
            node.target, node.args = local_experts, (*node.args, *ranks.slots)
            if ranks.turns is not None:
                layer = node.meta["layer"]
                table = fetch(graph, node, f"expert_turns_{layer}", ranks.turns[layer], node, ())
                node.args = (*node.args, table)
        if ranks.attention_dp:
            _dispatch(node, ranks.along)
            follow(node, combine_rows, ranks.along)
        else:
            follow(node, all_reduce, ranks.along)
    elif Placement.DIVIDED_NORM in read:
        _require(operation in (wide_rms_norm, gated_rms_norm), node, read[Placement.DIVIDED_NORM])
        (_norm_of_all_ranks if operation is wide_rms_norm else _gated_norm_of_all_ranks)(node, ranks.along)
    elif Placement.VOCABULARY in read:
        table = read[Placement.VOCABULARY]
        if operation is embedding:
            rows = graph.get_parameter(str(table.target)).shape[0]
            node.target, node.args = vocabulary_embedding, (*node.args, ranks.rank * rows)
            follow(node, all_reduce, ranks.along)
            return
        _require(operation.product and node.args[1] is table, node, table)


def _dispatch(mixture: fx.Node, along: Along) -> None:
    """Let a mixture and its router read the rows of all ranks."""
    own = mixture.args[0]
    assert isinstance(own, fx.Node)
    readers = [node for node in own.users if node is mixture or _leads_to(node, mixture)]
    rows = insert_after(own, dispatch_rows, own, along, of=mixture)
    for node in readers:
        node.replace_input_with(own, rows)


def _leads_to(node: fx.Node, later: fx.Node) -> bool:
    """Whether `later` reads what follows from `node`."""
    reached = {node}
    while node is not later:
        node = node.next
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    return later in reached


def _require(is_known: bool, node: fx.Node, parameter: fx.Node) -> None:
    if not is_known:
        operation = operation_of(node)
        assert operation is not None
        raise ValueError(
            f"{operation.name} reads {parameter.target}, which ranks divide; only of products and of norms is it "
            "known how their parts make the whole"
        )


def _norm_of_all_ranks(node: fx.Node, along: Along) -> None:
    """The scale of a row from the columns of all ranks."""
    x, weight, eps, offset = node.args
    total = insert_before(node, all_reduce, insert_before(node, mean_square, x), along)
    node.target, node.args = sharded_rms_norm, (x, total, along.size, weight, eps, offset)


def _gated_norm_of_all_ranks(node: fx.Node, along: Along) -> None:
    """The same of what a gate has let through, in a model whose groups of columns are one."""
    x, gate, weight, eps, _, gate_first = node.args
    assert gate_first
    total = insert_before(node, all_reduce, insert_before(node, gated_mean_square, x, gate), along)
    node.target, node.args = sharded_gated_rms_norm, (x, gate, total, along.size, weight, eps)


def _sum_product(node: fx.Node, ranks: _Ranks) -> None:
    """The product of each rank, all-reduced, and then the bias."""
    x, weight, *bias = node.args
    node.args = (x, weight, None)
    total = follow(node, all_reduce, ranks.along)
    if bias and bias[0] is not None:
        follow(total, operator.add, bias[0])
