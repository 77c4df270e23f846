"""Attention of a graph for long prompts leaves out blocks of keys."""

from __future__ import annotations

from torch import fx

from strata.graph.capture import operation_of
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.prompts import block_sparse_attention


def sparsify_attention(graph: fx.GraphModule, choice: BlockChoice) -> fx.GraphModule:
    """`attention` without a window becomes `block_sparse_attention` by this choice, in place; returns `graph`.

    For a graph that is not bound yet. Layers with windows see few keys as they are.
    """
    for node in list(graph.graph.nodes):
        if operation_of(node) is not attention or node.args[4].window is not None:
            continue
        given, sinks = node.args[:5], node.args[5:]
        with graph.graph.inserting_before(node):
            sparse = graph.graph.call_function(block_sparse_attention, (*given, choice, *sinks))
        sparse.meta = dict(node.meta)
        node.replace_all_uses_with(sparse)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph
