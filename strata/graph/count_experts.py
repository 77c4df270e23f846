"""A graph whose mixtures count how often each expert is chosen, for the placement of experts by load."""

from __future__ import annotations

from torch import Tensor, fx

from strata.graph.capture import operation_of
from strata.kernels.moe.count import count_choices
from strata.kernels.moe.experts import experts, local_experts

# The arguments that say which experts tokens go to, and of `local_experts` which rows are padding.
_CHOSEN, _SLOT_MAPPING = 2, 8


def count_experts(graph: fx.GraphModule, totals: Tensor) -> fx.GraphModule:
    """Let every mixture add its choices to `totals`, in place, in a captured graph that is not bound; returns `graph`.

    totals: [layers, experts] int64 on the device that runs the graph; all graphs of a model may share it. The graph's
    argument is a Batch with pages, whose slot mapping tells padding from tokens, if a mixture has none of its own
    (`leave_out_padding`). A graph without mixtures stays as it is. Where only some rows are wanted of the last layer
    (`gather_after_attention`), only theirs are counted there.
    """
    mixtures = [node for node in graph.graph.nodes if operation_of(node) in (experts, local_experts)]
    if not mixtures:
        return graph
    name = "expert_totals"
    graph.register_buffer(name, totals, persistent=False)
    batch = next(node for node in graph.graph.nodes if node.op == "placeholder")
    outside = {"module": "", "layer": None}
    with graph.graph.inserting_after(batch):
        held = graph.graph.get_attr(name)
        pages = graph.graph.call_function(getattr, (batch, "pages"))
    held.meta, pages.meta = {**outside, "parameters": ()}, dict(outside)
    with graph.graph.inserting_after(pages):
        places = graph.graph.call_function(getattr, (pages, "slot_mapping"))
    places.meta = dict(outside)
    for node in mixtures:
        known = node.args[_SLOT_MAPPING] if len(node.args) > _SLOT_MAPPING else places
        with graph.graph.inserting_before(node):
            counted = graph.graph.call_function(count_choices, (node.args[_CHOSEN], known, held, node.meta["layer"]))
        counted.meta = {"module": node.meta["module"], "layer": node.meta["layer"]}
        node.update_arg(_CHOSEN, counted)
    graph.recompile()
    return graph
