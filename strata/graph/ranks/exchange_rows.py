"""Rows of steps with many tokens go to the ranks that hold their experts alone, instead of to all."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

from torch import fx

from strata.comm.experts.rows import dispatch_rows
from strata.comm.experts.sent_rows import Arrived, return_rows, send_rows
from strata.comm.operations import Along
from strata.graph.rewrite import insert_before
from strata.graph.trace import operation_of
from strata.kernels.moe.combine import combine
from strata.kernels.moe.count import count_choices
from strata.kernels.moe.experts import experts, local_experts


def exchange_rows(graph: fx.GraphModule, along: Along, index: int, *, counted: bool) -> fx.GraphModule:
    """Let each rank along `along` route its own rows and send them to the ranks of their experts; in place, before the
    graph is bound; returns `graph`.

    graph: of rank `index`, as `shard` with `attention_dp` and `leave_out_padding` made it and `gather_after_attention`
    left it, for a step of many tokens that is launched: the host waits for the device in each mixture. counted: some
    rank counts the choices of all (`count_experts`), so they travel to all.

        dispatch_rows, router, local_experts, combine_rows  ->  router, send_rows, experts, return_rows, combine

    The few rows behind the last attention go to all ranks as before. Sums are those of the ranks in their order, as
    before, rounded once.
    """
    nodes = list(graph.graph.nodes)
    _, rows = (node for node in nodes if node.op == "placeholder")
    many = nodes[: min(map(nodes.index, rows.users), default=len(nodes))]
    for node in many:
        if operation_of(node) is local_experts:
            _exchange(node, along, index, counted=counted)
    # Which rows of others are padding nobody asks any more, unless they are counted.
    for node in list(graph.graph.nodes):
        if operation_of(node) is dispatch_rows and not node.users and not counted:
            graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _exchange(mixture: fx.Node, along: Along, index: int, *, counted: bool) -> None:
    gathered, weights, chosen, gate_up, down, _, slots, placement, everyone = mixture.args
    assert isinstance(gathered, fx.Node)
    assert isinstance(chosen, fx.Node)
    (combined,) = mixture.users
    own = _argument(gathered)
    gathered.replace_all_uses_with(own)  # its router's too
    if operation_of(chosen) is count_choices:
        counts, chosen = chosen, _argument(chosen)
        counts.update_arg(0, insert_before(counts, dispatch_rows, chosen, along, of=mixture))
    elif counted:
        insert_before(mixture, dispatch_rows, chosen, along)
    call = partial(insert_before, mixture)
    arrived = call(send_rows, own, along, weights, chosen, index, slots, placement, _argument(everyone))
    field = {name: call(getattr, arrived, name) for name in Arrived._fields}
    rows, scales, numbers, products = itemgetter("rows", "weights", "numbers", "products")(field)
    made = call(experts, rows, scales, numbers, gate_up, down, products)
    back = call(return_rows, made, along, field["sent"], field["received"])
    combined.replace_all_uses_with(call(combine, back, field["source"], field["inverse"], None))
    for node in (combined, mixture, gathered):
        mixture.graph.erase_node(node)


def _argument(node: Any) -> fx.Node:
    """The first, of which a node makes what it makes."""
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first
