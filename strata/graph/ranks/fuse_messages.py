"""What ranks add up and the norm or product beside it become one operation: a message and a kernel in one launch."""

from __future__ import annotations

from torch import fx

from strata.comm.operations import all_reduce
from strata.comm.reduced_norm import all_reduce_add_rms_norm, linear_all_reduce_add_rms_norm
from strata.comm.under_way import finish_add_rms_norm, finish_all_reduce
from strata.graph.match import Call, Hole, find
from strata.graph.rewrite import finished, insert_before, joined, replace
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import add_rms_norm
from strata.kernels.op import Operation, has_quantized

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
            for found in find(graph, Call(add_rms_norm, (*summands, Hole("weight"), Hole("eps")), "norm")):
                norm, arguments = found["norm"], (found[name] for name in (*taken, "residual", "weight", "eps"))
                replace(norm, insert_before(norm, operation, *arguments, module=joined(norm, "all_reduce")))
    return finished(graph)


def fuse_gemm_all_reduce(graph: fx.GraphModule) -> fx.GraphModule:
    """`all_reduce_add_rms_norm` of a `linear` without a bias becomes `linear_all_reduce_add_rms_norm`: in decode steps
    of ranks what is computed is sent.

    In place, in a graph that `fuse_messages` has gone over and that is not bound, where nothing else reads the product
    and its weight is not packed; returns `graph`.
    """
    for message in list(graph.graph.find_nodes(op="call_function", target=all_reduce_add_rms_norm)):
        product, along, *others = message.args
        if product.target is not linear or len(product.users) > 1 or has_quantized(product.args):
            continue
        x, weight, bias = (*product.args, None)[:3]
        if bias is None:
            given, name = (x, along, weight, *others), joined(product, message)
            replace(message, insert_before(message, linear_all_reduce_add_rms_norm, *given, of=product, module=name))
    return finished(graph)
