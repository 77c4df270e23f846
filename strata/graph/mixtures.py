"""What mixtures of experts are told of a step's rows: how often each expert is chosen is counted, for the placement of
experts by load; and padding, which ranks that bring rows of their own have at times, goes to no expert."""

from __future__ import annotations

from torch import Tensor, fx

from strata.comm.experts.rows import dispatch_rows
from strata.comm.operations import Along
from strata.graph.rewrite import fetch, insert_after, insert_before
from strata.graph.trace import operation_of
from strata.kernels.moe.count import count_choices
from strata.kernels.moe.experts import experts, local_experts
from strata.kernels.op import Operation

# Arguments: which experts tokens go to; of `local_experts` the placement, which may be missing, and behind it which
# rows are padding.
_CHOSEN, _PLACEMENT, _SLOT_MAPPING = 2, 7, 8


def count_experts(graph: fx.GraphModule, totals: Tensor) -> fx.GraphModule:
    """Let every mixture add its choices to `totals`, in place, in a traced graph that is not bound; returns `graph`.

    totals: [layers, experts] int64 on the device that runs the graph; all graphs of a model may share it. The graph's
    argument is a Batch with pages, whose slot mapping tells padding from tokens, if a mixture has none of its own
    (`leave_out_padding`). A graph without mixtures stays as it is. Where only some rows are wanted of the last layer
    (`gather_after_attention`), only theirs are counted there.
    """
    mixtures = _mixtures(graph, experts, local_experts)
    if not mixtures:
        return graph
    places = _slot_mapping(graph)
    held = fetch(graph, places, "expert_totals", totals, places, ())
    for node in mixtures:
        known = node.args[_SLOT_MAPPING] if len(node.args) > _SLOT_MAPPING else places
        counted = insert_before(node, count_choices, node.args[_CHOSEN], known, held, node.meta["layer"])
        node.update_arg(_CHOSEN, counted)
    graph.recompile()
    return graph


def leave_out_padding(graph: fx.GraphModule, along: Along) -> fx.GraphModule:
    """Let every `local_experts` know which rows of which rank are padding, in a traced graph that is not bound; in
    place, returns `graph`.

    The graph's argument is a Batch with pages, whose slot mapping tells: it travels once, for all layers.
    """
    mixtures = _mixtures(graph, local_experts)
    if not mixtures:
        return graph
    own = _slot_mapping(graph)
    everyone = insert_after(own, dispatch_rows, own, along)
    for node in mixtures:
        placed = (*node.args, None)[: _PLACEMENT + 1]
        node.args = (*placed, everyone)
    graph.recompile()
    return graph


def _mixtures(graph: fx.GraphModule, *operations: Operation) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if operation_of(node) in operations]


def _slot_mapping(graph: fx.GraphModule) -> fx.Node:
    """Where the rows of a graph's Batch go in its pages: nowhere, if they are padding."""
    batch = next(node for node in graph.graph.nodes if node.op == "placeholder")
    pages = insert_after(batch, getattr, batch, "pages")
    return insert_after(pages, getattr, pages, "slot_mapping")
