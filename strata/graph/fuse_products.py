"""In graphs of decode steps, products take up the norms and the gating around them, which few rows make launches of."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from strata.graph.fuse import fuse_gating
from strata.graph.match import Call, Hole, Match, find
from strata.graph.rewrite import finished, insert_before, joined, replace, value_of
from strata.kernels.linear.linear import linear
from strata.kernels.linear.prenorm import linear_add, scaled_linear, scaled_linear_silu_mul
from strata.kernels.linear.silu_mul import linear_silu_mul
from strata.kernels.norm.norm import add_rms_norm


def fuse_products(graph: fx.GraphModule) -> fx.GraphModule:
    """Fuse products with what stands around them, in place, in a graph that `fuse` has gone over; returns `graph`.

    - A product that a residual is added to, the norm of the sum, and the products that alone read that norm become a
      `linear_add` and a `scaled_linear` for each reader. Others may read the sum.
    - A `scaled_linear` of which nothing but `silu_mul` of its halves is read becomes `scaled_linear_silu_mul`; a
      `linear`, whose norm is another's (in graphs of ranks, of the message before it), becomes `linear_silu_mul`.

    The scale of a norm is applied after the product instead of before it, so results are rounded otherwise: for one
    token this graph and the plain one may differ in bits, and there is no deterministic implementation. In float16 sums
    keep their norms, because without its scale a sum may be too large for it.
    """
    _fuse_norms(graph)
    fuse_gating(graph, scaled_linear, scaled_linear_silu_mul, ("weighted", "squares", "eps", "weight", "bias"))
    fuse_gating(graph, linear, linear_silu_mul, ("x", "weight", "bias"))
    return finished(graph)


_NORM = Call(add_rms_norm, (Hole("x"), Hole("residual"), Hole("weight"), Hole("eps")), "norm")


def _fuse_norms(graph: fx.GraphModule) -> None:
    for found in find(graph, _NORM):
        weight, readers = found["weight"], _readers(found["norm"])
        if not readers or weight.op != "get_attr" or value_of(graph, weight).dtype == torch.float16:
            continue
        for product, residual in ((found["x"], found["residual"]), (found["residual"], found["x"])):
            if product.target is linear and len(product.users) == 1 and product is not residual:
                _fuse_norm(found, product, residual, readers)
                break


def _readers(norm: fx.Node) -> list[fx.Node]:
    """The products that read the norm (not the sum) as their rows; none if anything else reads it."""
    normed = [user for user in norm.users if user.target is getitem and user.args[1] == 1]
    readers = [(one, user) for one in normed for user in one.users]
    if all(user.target is linear and user.args[0] is one and one not in user.args[1:] for one, user in readers):
        return [user for _, user in readers]
    return []


def _fuse_norm(found: Match, product: fx.Node, residual: fx.Node, readers: list[fx.Node]) -> None:
    norm = found["norm"]
    given = (*_arguments(product), residual, found["weight"])
    fused = insert_before(norm, linear_add, *given, of=product, module=joined(product, norm))
    total, weighted, squares = (insert_before(norm, getitem, fused, index, of=fused) for index in range(3))
    for reader in readers:
        _, weight, bias = _arguments(reader)
        replace(reader, insert_before(reader, scaled_linear, weighted, squares, found["eps"], weight, bias))
    for item in list(norm.users):
        if item.args[1] == 0:
            item.replace_all_uses_with(total)
        item.graph.erase_node(item)
    for node in (norm, product):
        node.graph.erase_node(node)


def _arguments(product: fx.Node) -> tuple[Any, ...]:
    """x, weight and bias, which need not be given."""
    return (*product.args, None)[:3]
