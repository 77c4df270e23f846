"""Sums over ranks in two levels: among those that a faster link joins, and of a part each between such groups."""

from __future__ import annotations

from torch import fx

from strata.comm.operations import Along, all_gather, all_reduce, reduce_scatter
from strata.graph.ranks.quantize_messages import is_made_of_weights
from strata.graph.rewrite import chain
from strata.graph.trace import operation_of

INSIDE_AXIS, ACROSS_AXIS = "tp_inside", "tp_across"  # of neighbours, and of those with one place in their groups


def hierarchical_sums(graph: fx.GraphModule, inside: int, ranks: int) -> fx.GraphModule:
    """Add up what products and experts make in groups of `inside` neighbours of `ranks` first; in place, before the
    graph is bound; returns `graph`.

        all_reduce  ->  reduce_scatter inside, all_reduce across, all_gather inside

    Of n bytes on each rank, n / inside go to other groups, twice (`hierarchical_all_reduce_cost`). Sums are rounded to
    their dtype once more, between both. Sums of embeddings and of mean squares stay.
    """
    within, between = Along(INSIDE_AXIS, inside), Along(ACROSS_AXIS, ranks // inside)
    for node in list(graph.graph.nodes):
        if operation_of(node) is all_reduce and node.args[1].size == ranks and is_made_of_weights(node.args[0]):
            chain(node, (reduce_scatter, within, -1), (all_reduce, between), (all_gather, within, -1))
    graph.recompile()
    return graph
