"""In decode steps of ranks, a product and the sum over ranks that takes it up become one: what is computed is sent."""

from __future__ import annotations

from torch import fx

from strata.comm.reduced_norm import all_reduce_add_rms_norm, linear_all_reduce_add_rms_norm
from strata.graph.capture import must_stay
from strata.kernels.linear.linear import linear
from strata.kernels.op import has_packed


def fuse_sent_products(graph: fx.GraphModule) -> fx.GraphModule:
    """`all_reduce_add_rms_norm` of a `linear` without a bias becomes `linear_all_reduce_add_rms_norm`.

    In place, in a graph that `fuse_messages` has gone over and that is not bound, where nothing else reads the product
    and its weight is not packed; returns `graph`.
    """
    for message in list(graph.graph.find_nodes(op="call_function", target=all_reduce_add_rms_norm)):
        product, *others = message.args
        if product.target is not linear or len(product.users) > 1 or has_packed(product.args):
            continue
        x, weight, bias = (*product.args, None)[:3]
        if bias is not None:
            continue
        along, *others = others
        with graph.graph.inserting_before(message):
            fused = graph.graph.call_function(linear_all_reduce_add_rms_norm, (x, along, weight, *others))
        norm = message.meta["module"].rpartition(".")[2]
        fused.meta = {"module": f"{product.meta['module']}+{norm}", "layer": product.meta["layer"]}
        message.replace_all_uses_with(fused)
        graph.graph.erase_node(message)
    graph.graph.eliminate_dead_code(is_impure_node=must_stay)
    graph.recompile()
    return graph
