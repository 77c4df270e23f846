"""Rows in parts: while the sum over ranks of one part's rows travels, the products of another's run.

Between two attentions every row is computed alone, so the rows of a step can be divided there, and only what attention
reads has to be put together again. The rows that a residual connection carries stay in parts through all layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import getitem
from typing import Any

import torch
from torch import fx

from strata.comm.operations import all_reduce
from strata.comm.under_way import finish_all_reduce, start_all_reduce
from strata.graph.gather import ROWWISE
from strata.graph.ranks.row_split import AT_HALF, PARTS, RowSplit, row_half
from strata.graph.rewrite import finished, insert_after, insert_before
from strata.graph.trace import operation_of, reads_state
from strata.kernels.moe.count import count_choices

# Of messages: those of a part take turns, see `_slot`.
SLOTS = 3 * PARTS


def overlap(graph: fx.GraphModule, division: RowSplit = AT_HALF) -> fx.GraphModule:
    """Let each `all_reduce` in front of the last attention travel while products of other rows run; returns `graph`.

    In place, before the graph is bound and messages are fused. Rows are divided, at `division`, from an attention (or
    the start) to the last product in front of the next one. There each part goes as far as its next message, one part
    after the other:

        part 0: o  | message .........| gate/up, down  | message .........| q/k/v
        part 1:    | o  | message ..........   | gate/up, down | message ........   | q/k/v

    Products have fewer rows, for which the library may choose other kernels, so bits differ from those of the graph as
    it was. Nothing is changed between two attentions where something that treats rows together stands on the way from
    a message to a product.
    """
    nodes = list(graph.graph.nodes)
    last = next((node for node in reversed(nodes) if reads_state(node)), None)
    if last is not None:
        parts = _Parts(graph.graph, division)
        for has_state, between in groupby(nodes[: nodes.index(last)], reads_state):
            stretch = list(between)
            divided = [] if has_state else divisible(stretch)
            if divided:
                early = stretch[: stretch.index(divided[-1])]
                parts.divide(divided, _followers(early, set(divided)))
        parts.put_together()
    return finished(graph)


def divisible(nodes: list[fx.Node]) -> list[fx.Node]:
    """Of what stands between two attentions, that which leads from its rows to products and messages, in order; nothing
    if there is no message, or if that cannot be computed part by part."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if _is_rowwise(node) and (_is_goal(node) or any(user in found for user in node.users)):
            found.add(node)
    items = {user for node in found for user in node.users if user.target is getitem}
    if not items <= set(nodes) or not any(travels(node) for node in found):
        return []
    found |= items
    followers = _followers(nodes, found)
    if any(source in followers for node in found for source in node.all_input_nodes):
        return []  # it treats rows together, and they go on from there
    return [node for node in nodes if node in found]


def _followers(nodes: list[fx.Node], found: set[fx.Node]) -> dict[fx.Node, None]:
    """Those of the nodes that are not among `found` and follow from one that is, in order."""
    followers: dict[fx.Node, None] = {}
    for node in nodes:
        if node not in found and any(source in found or source in followers for source in node.all_input_nodes):
            followers[node] = None
    return followers


def _is_rowwise(node: fx.Node) -> bool:
    if all(source.op == "get_attr" for source in node.all_input_nodes):
        return False
    operation = operation_of(node)
    if operation is count_choices:
        return True  # sums of integers are the same in parts, and graphs of ranks that do not count are divided alike
    return node.target in ROWWISE if operation is None else operation.rowwise and not operation.mutates


def _is_goal(node: fx.Node) -> bool:
    operation = operation_of(node)
    return operation is not None and (operation.product or operation.collective)


def travels(node: fx.Node) -> bool:
    """Whether a node is a sum over ranks of what an operation has made for it alone, whose memory it may have."""
    if node.target is not all_reduce:
        return False
    x = node.args[0]
    return isinstance(x, fx.Node) and operation_of(x) is not None and len(x.users) == 1


def steps(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """How many messages, one after another, lead to each node."""
    found: dict[fx.Node, int] = {}
    for node in nodes:
        before = [found[source] + travels(source) for source in node.all_input_nodes if source in found]
        found[node] = max(before, default=0)
    return found


class _Parts:
    """A graph in which nodes are divided, and the parts that take their places."""

    def __init__(self, graph: fx.Graph, division: RowSplit) -> None:
        self._graph = graph
        self._division = division
        self._parts: dict[fx.Node, list[fx.Node]] = {}
        self._under_way: dict[fx.Node, list[fx.Node]] = {}
        self._views: dict[fx.Node, list[fx.Node]] = {}  # of what is whole
        self._messages = [0] * PARTS  # so far, of each part
        self._last: fx.Node  # that has been added

    def divide(self, nodes: list[fx.Node], followers: Iterable[fx.Node]) -> None:
        """Compute these by parts: each part as far as its next message, then the other parts as far as theirs.
        followers: what comes after them and does not stand there yet."""
        self._last = last = nodes[-1]
        for node in followers:
            last.append(node)
            last = node
        self._views.clear()  # of no use to a later stretch, and what they view should not live as long
        at = steps(nodes)
        for step in range(1 + max(at.values())):
            for part in range(PARTS):
                for node in nodes:
                    if at[node] == step:
                        self._add(node, part)
        for node in nodes:
            for part in range(PARTS):
                self._part_of(node, part, node)  # a message that only others wait for

    def put_together(self) -> None:
        """Whoever still reads a divided node reads all its rows; the divided nodes go."""
        for node, parts in self._parts.items():
            users = [user for user in node.users if user not in self._parts]
            if users:
                joined = insert_before(min(users), torch.cat, parts, of=node)
                for user in users:
                    user.replace_input_with(node, joined)
        for node in reversed(self._parts):
            self._graph.erase_node(node)

    def _add(self, node: fx.Node, part: int) -> None:
        given = {source: self._part_of(source, part, node) for source in node.all_input_nodes}
        if travels(node):
            arguments = (*fx.map_arg(node.args, given.__getitem__), _slot(part, self._messages[part]))
            self._messages[part] += 1
            self._under_way.setdefault(node, []).append(self._call(start_all_reduce, arguments, node))
        else:
            with self._graph.inserting_after(self._last):
                self._last = self._graph.node_copy(node, given.__getitem__)
            self._parts.setdefault(node, []).append(self._last)

    def _part_of(self, source: fx.Node, part: int, reader: fx.Node) -> fx.Node:
        """What the part of a reader reads: of weights all, of messages what has arrived then."""
        if source.op == "get_attr":
            return source
        if source in self._under_way:
            arrived = self._parts.setdefault(source, [])
            if len(arrived) == part:
                arrived.append(self._call(finish_all_reduce, (self._under_way[source][part],), source))
            return arrived[part]
        if source in self._parts:
            return self._parts[source][part]
        views = self._views.setdefault(source, [])
        if len(views) == part:
            views.append(self._call(row_half, (source, part, self._division), reader))
        return views[part]

    def _call(self, target: Any, arguments: tuple[Any, ...], place: fx.Node) -> fx.Node:
        """A call behind all that has been added, in the place of a node."""
        self._last = insert_after(self._last, target, *arguments, of=place)
        return self._last


def _slot(part: int, message: int) -> int:
    """Of a part's messages each is begun when the one before it has been finished, so two slots in turns are enough,
    and another one for the first, which follows the last of the step before."""
    return part + PARTS * (0 if message == 0 else 1 + message % 2)
