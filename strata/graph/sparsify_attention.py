"""Attention of a graph leaves out keys: of long prompts in blocks, of decodes in pages."""

from __future__ import annotations

from torch import fx

from strata.graph.rewrite import insert_before, replace
from strata.graph.trace import operation_of
from strata.kernels.attention.attention import attention
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.decodes import page_sparse_attention
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.kernels.attention.sparse.prompts import block_sparse_attention
from strata.kernels.op import Operation

# Of whose keys decodes see all: they attend widely (Tang et al. 2024, section 3.3).
_FIRST_LAYERS = 2


def sparsify_attention(graph: fx.GraphModule, choice: BlockChoice) -> fx.GraphModule:
    """`attention` without a window becomes `block_sparse_attention` by this choice, in place; returns `graph`.

    For a graph that is not bound yet. Layers with windows see few keys as they are.
    """
    return _replace(graph, block_sparse_attention, choice, 0)


def select_pages(graph: fx.GraphModule, choice: PageChoice) -> fx.GraphModule:
    """`attention` without a window becomes `page_sparse_attention` by this choice, in place, but for the first two
    layers of the model, of which the graph may be a stage; returns `graph`. For a graph that is not bound yet."""
    return _replace(graph, page_sparse_attention, choice, _FIRST_LAYERS)


def _replace(
    graph: fx.GraphModule, operation: Operation, choice: BlockChoice | PageChoice, first: int
) -> fx.GraphModule:
    for node in list(graph.graph.nodes):
        if operation_of(node) is not attention or node.args[4].window is not None or node.meta["layer"] < first:
            continue
        replace(node, insert_before(node, operation, *node.args[:5], choice, *node.args[5:]))
    graph.recompile()
    return graph
