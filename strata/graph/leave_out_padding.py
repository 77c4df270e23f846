"""Where ranks bring rows of their own to experts, each fewer than the others at times, padding goes to no expert."""

from __future__ import annotations

from torch import fx

from strata.comm.experts.rows import dispatch_rows
from strata.comm.operations import Along
from strata.graph.capture import operation_of
from strata.kernels.moe.experts import local_experts

_BEFORE = 7  # arguments of `local_experts` in front of the placement, which may be missing


def leave_out_padding(graph: fx.GraphModule, along: Along) -> fx.GraphModule:
    """Let every `local_experts` know which rows of which rank are padding, in a captured graph that is not bound; in
    place, returns `graph`.

    The graph's argument is a Batch with pages, whose slot mapping tells: it travels once, for all layers.
    """
    mixtures = [node for node in graph.graph.nodes if operation_of(node) is local_experts]
    if not mixtures:
        return graph
    batch = next(node for node in graph.graph.nodes if node.op == "placeholder")
    with graph.graph.inserting_after(batch):
        pages = graph.graph.call_function(getattr, (batch, "pages"))
    with graph.graph.inserting_after(pages):
        own = graph.graph.call_function(getattr, (pages, "slot_mapping"))
    with graph.graph.inserting_after(own):
        everyone = graph.graph.call_function(dispatch_rows, (own, along))
    for node in (pages, own, everyone):
        node.meta = {"module": "", "layer": None}
    for node in mixtures:
        placement = node.args[_BEFORE] if len(node.args) > _BEFORE else None
        node.args = (*node.args[:_BEFORE], placement, everyone)
    graph.recompile()
    return graph
