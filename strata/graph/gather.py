"""What follows the last attention treats each token alone, so tokens whose results nobody wants can be left out."""

from __future__ import annotations

import operator
from operator import getitem
from typing import Any

import torch
from torch import fx

from strata.comm.experts.rows import dispatch_rows
from strata.graph.rewrite import insert_before
from strata.graph.trace import operation_of, reads_state

# What is no operation, and treats each token alone as the model layers call it.
ROWWISE: set[Any] = {operator.add, getitem, "flatten", "unflatten", "split_with_sizes", "to"}


def gather_after_attention(graph: fx.GraphModule) -> fx.GraphModule:
    """Let the graph take a second argument, `rows` [rows] int32, and return the results of these tokens alone.

    The rows are gathered at the last attention; in front of it all tokens are computed, because their keys and values
    are wanted. In place, before the graph is bound; returns `graph`. A prompt of which only the last token is sampled
    saves the last layer's MLP and output projection. Raises ValueError if something after the last attention does not
    treat tokens alone.
    """
    nodes = graph.graph.nodes
    argument = next(node for node in nodes if node.op == "placeholder")
    last = next((node for node in reversed(nodes) if reads_state(node)), None)
    if last is None:
        raise ValueError("the graph has no attention after which rows could be gathered")
    after = _downstream(last)
    for user in last.users:
        if user.target is getitem and isinstance(user.args[1], int):
            after.pop(user)  # one of several results, whose rows are gathered
    for node in after:
        operation = operation_of(node)
        if not (node.target in ROWWISE if operation is None else operation.rowwise):
            raise ValueError(f"{node.target} follows the last attention and mixes tokens or is not known not to")
    with graph.graph.inserting_after(argument):
        rows = graph.graph.placeholder("rows")
    sources = {source: None for node in after for source in node.all_input_nodes if source not in after}
    for source in sources:
        if source.op == "get_attr":
            continue
        users = [user for user in source.users if user in after]
        kept = _chosen(min(users), source, rows)
        for user in users:
            user.replace_input_with(source, kept)
    graph.recompile()
    return graph


def _chosen(place: fx.Node, source: fx.Node, rows: fx.Node) -> fx.Node:
    """The rows of a value, in front of `place`; of what all ranks have sent, those that each chooses among its own."""
    sent = operation_of(source) is dispatch_rows
    own = source.all_input_nodes[0] if sent else source
    kept = insert_before(place, torch.index_select, own, 0, rows, of=own)
    return insert_before(place, dispatch_rows, kept, *source.args[1:], of=source) if sent else kept


def _downstream(start: fx.Node) -> dict[fx.Node, None]:
    """Every node but the output that follows from `start`, in order."""
    found: dict[fx.Node, None] = {}
    node = start
    while node.op != "output":
        if any(source is start or source in found for source in node.all_input_nodes):
            found[node] = None
        node = node.next
    return found
