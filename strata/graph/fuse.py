"""Neighbouring parts of one product that undergo the same operation undergo it together."""

from __future__ import annotations

from itertools import groupby
from operator import getitem
from typing import Any

from torch import fx

from strata.kernels.rope import rope


def fuse(graph: fx.GraphModule) -> fx.GraphModule:
    """Rotate queries and keys in one call, in place, in a merged graph that is not bound; returns `graph`.

    Applies where heads [tokens, heads, head_dim] are neighbouring parts of a split and nothing but `rope` by the same
    angles reads them. The results are views of the joint one, with its token stride.
    """
    for split in graph.graph.find_nodes(op="call_method", target="split_with_sizes"):
        parts = sorted((user for user in split.users if user.target is getitem), key=_index)
        for kind, neighbours in groupby(parts, key=_rotation):
            together = list(neighbours)
            if kind is not None and len(together) > 1 and len(parts) == len(split.args[1]):
                _rotate_together(split, together)
    graph.graph.eliminate_dead_code(is_impure_node=lambda node: node.target not in ("unflatten", getitem))
    graph.recompile()
    return graph


def _index(part: fx.Node) -> Any:
    return part.args[1]


def _rotation(part: fx.Node) -> tuple[Any, ...] | None:
    """How a part is viewed as heads and by which angles they are rotated; None if anything else becomes of it."""
    view = _only_user(part)
    rotated = _only_user(view) if view is not None and view.target == "unflatten" else None
    if view is None or rotated is None or rotated.target is not rope or rotated.args[0] is not view:
        return None
    return *view.args[1:], *rotated.args[1:]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _rotate_together(split: fx.Node, parts: list[fx.Node]) -> None:
    product, sizes, _ = split.args
    assert isinstance(sizes, (list, tuple))
    widths: list[Any] = [sizes[_index(part)] for part in parts]
    views = [next(iter(part.users)) for part in parts]
    ropes = [next(iter(view.users)) for view in views]
    start, head_dim = sum(sizes[: _index(parts[0])]), views[0].args[2][1]  # type: ignore[index]
    graph = split.graph
    with graph.inserting_before(min(ropes)):
        joined = graph.call_method("narrow", (product, -1, start, sum(widths)))
        heads = graph.call_method("unflatten", (joined, *views[0].args[1:]))
        rotated = graph.call_function(rope, (heads, *ropes[0].args[1:]))
        again = graph.call_method("split_with_sizes", (rotated, [width // head_dim for width in widths], -2))
        results = [graph.call_function(getitem, (again, index)) for index in range(len(parts))]
    for node in (joined, heads, rotated, again, *results):
        node.meta = dict(ropes[0].meta)
    for separate, result in zip(ropes, results, strict=True):
        separate.replace_all_uses_with(result)
        graph.erase_node(separate)
