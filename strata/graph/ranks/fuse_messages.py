"""What ranks add up and the norm behind it become one operation: a small message and a short kernel in one launch."""

from __future__ import annotations

from torch import fx

from strata.comm.operations import all_reduce
from strata.comm.reduced_norm import all_reduce_add_rms_norm
from strata.comm.under_way import finish_add_rms_norm, finish_all_reduce
from strata.graph.capture import must_stay
from strata.graph.match import Call, Hole, find
from strata.kernels.norm.norm import add_rms_norm
from strata.kernels.op import Operation

_SUMMED = Call(all_reduce, (Hole("x"), Hole("along")), "summed", read_once=True)
_FINISHED = Call(finish_all_reduce, (Hole("pending"),), "summed", read_once=True)
# What is summed, the operation that takes up its norm, and what that takes of it.
_SUMS: tuple[tuple[Call, Operation, tuple[str, ...]], ...] = (
    (_SUMMED, all_reduce_add_rms_norm, ("x", "along")),
    (_FINISHED, finish_add_rms_norm, ("pending",)),
)


def fuse_messages(graph: fx.GraphModule) -> fx.GraphModule:
    """`add_rms_norm` of what `all_reduce` returns, as either of its summands, becomes `all_reduce_add_rms_norm`, and of
    what `finish_all_reduce` does `finish_add_rms_norm`.

    In place, in a fused graph that is not bound, where nothing else reads the sum over the ranks; returns `graph`.
    """
    for summed, operation, taken in _SUMS:
        for summands in ((summed, Hole("residual")), (Hole("residual"), summed)):
            pattern = Call(add_rms_norm, (*summands, Hole("weight"), Hole("eps")), "norm")
            for found in find(graph, pattern):
                norm = found["norm"]
                arguments = tuple(found[name] for name in (*taken, "residual", "weight", "eps"))
                with graph.graph.inserting_before(norm):
                    fused = graph.graph.call_function(operation, arguments)
                fused.meta = {"module": f"{norm.meta['module']}+all_reduce", "layer": norm.meta["layer"]}
                norm.replace_all_uses_with(fused)
                graph.graph.erase_node(norm)
    graph.graph.eliminate_dead_code(is_impure_node=must_stay)
    graph.recompile()
    return graph
