"""What ranks add up and the norm behind it become one operation: a small message and a short kernel in one launch."""

from __future__ import annotations

from torch import fx

from strata.comm.operations import all_reduce
from strata.comm.reduced_norm import all_reduce_add_rms_norm
from strata.graph.capture import must_stay
from strata.graph.match import Call, Hole, find
from strata.kernels.norm.norm import add_rms_norm

_SUMMED = Call(all_reduce, (Hole("x"), Hole("along")), "summed", read_once=True)


def fuse_messages(graph: fx.GraphModule) -> fx.GraphModule:
    """`add_rms_norm` of what `all_reduce` returns, as either of its summands, becomes `all_reduce_add_rms_norm`.

    In place, in a fused graph that is not bound, where nothing else reads the sum over the ranks; returns `graph`.
    """
    for summands in ((_SUMMED, Hole("residual")), (Hole("residual"), _SUMMED)):
        pattern = Call(add_rms_norm, (*summands, Hole("weight"), Hole("eps")), "norm")
        for found in find(graph, pattern):
            norm = found["norm"]
            arguments = tuple(found[name] for name in ("x", "along", "residual", "weight", "eps"))
            with graph.graph.inserting_before(norm):
                fused = graph.graph.call_function(all_reduce_add_rms_norm, arguments)
            fused.meta = {"module": f"{norm.meta['module']}+all_reduce", "layer": norm.meta["layer"]}
            norm.replace_all_uses_with(fused)
            graph.graph.erase_node(norm)
    graph.graph.eliminate_dead_code(is_impure_node=must_stay)
    graph.recompile()
    return graph
