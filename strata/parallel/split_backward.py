"""A backward pass in two parts: the gradient of the inputs, for which others wait, and later that of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


@dataclass
class WeightGradients:
    """What is left of a backward pass. Keeps the graph and what it saved until `run`.

    has_begun: whether weights have got gradients already.
    """

    left: list[tuple[list[GradientEdge], list[Tensor], list[Tensor] | None]] = field(default_factory=list)
    has_begun: bool = False

    def run(self) -> None:
        """Add the gradients of the weights that are left to their `grad`; hooks on them run as in any backward pass."""
        for edges, gradients, weights in self.left:
            torch.autograd.backward(edges, gradients, inputs=weights)
        self.left.clear()


def backward_of_inputs(
    output: GradientEdge, gradient: Tensor, given: Tensor | None
) -> tuple[Tensor | None, WeightGradients]:
    """The gradient of the leaf `given`, which `output` was computed from, and what is left to do for the weights.

    output: `get_gradient_edge` of a tensor, whose gradient is `gradient`. given: None if nobody waits for a gradient:
    then all is left.

    Operations of torch compute one gradient without the other. A custom function that computes both at once adds that
    of its weight here and now, so that nothing is computed twice.

    Raises ValueError if a weight is used twice between `given` and `output`: its uses could not be told apart.
    """
    if given is None:
        return None, WeightGradients([([output], [gradient], None)])
    uses = list(_weight_uses(output.node, get_gradient_edge(given).node))
    weights = [id(weight) for use in uses for edge in use.edges for weight in edge.weights]
    if len(weights) != len(set(weights)):
        raise ValueError("a weight is used twice in one stage; choose a schedule whose backward passes are whole")
    hooks = [use.node.register_hook(use.keep) for use in uses]
    (of_given,) = torch.autograd.grad(output, given, gradient, retain_graph=True)
    for hook in hooks:
        hook.remove()
    left = WeightGradients()
    for use in uses:
        use.finish(left)
    return of_given, left


@dataclass
class _WeightEdge:
    """An edge that leads from a node to weights alone. place: among the node's edges."""

    edge: GradientEdge
    place: int
    weights: list[Tensor]


@dataclass
class _WeightUse:
    """A node through which the gradient passes on its way to the inputs, and from which edges lead to weights."""

    node: Node
    edges: list[_WeightEdge]
    arrived: Sequence[Tensor | None] = ()
    made: Sequence[Tensor | None] = ()

    def keep(self, made: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]) -> None:
        """A hook of the node: what came to it, and what it made for its edges."""
        self.made, self.arrived = made, arrived

    def finish(self, left: WeightGradients) -> None:
        """Pass on what the node made for weights although nobody asked; the rest is left."""
        waiting = []
        for one in self.edges:
            found = self.made[one.place] if self.made else None
            if found is None:
                waiting += one.weights
            else:
                torch.autograd.backward([one.edge], [found], inputs=one.weights)
                left.has_begun = True
        arrived = [(place, one) for place, one in enumerate(self.arrived) if one is not None]
        if waiting and arrived:
            edges = [GradientEdge(self.node, place) for place, _ in arrived]
            left.left.append((edges, [one for _, one in arrived], waiting))
        self.made = ()


def _weight_uses(start: Node, end: Node) -> Iterator[_WeightUse]:
    """Of the nodes on ways from `start` to `end` those that use weights."""
    order = _inputs_first(start)
    on_way = {end}
    weights: dict[Node, list[Tensor]] = {}
    for node in order:
        below = [next_node for next_node, _ in node.next_functions if next_node is not None]
        if not on_way.isdisjoint(below):
            on_way.add(node)
        elif node is not end:
            weights[node] = _weights_at(node, [weights[one] for one in below])
    for node in order:
        if node not in on_way or node is end:
            continue
        edges = [
            _WeightEdge(GradientEdge(next_node, number), place, weights[next_node])
            for place, (next_node, number) in enumerate(node.next_functions)
            if next_node is not None and weights.get(next_node)
        ]
        if edges:
            yield _WeightUse(node, edges)


def _weights_at(node: Node, below: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The leaves that the gradient reaches from a node, each once. below: those of the nodes that it leads to."""
    variable = getattr(node, "variable", None)  # of a node that ends at a leaf
    own = [variable] if isinstance(variable, Tensor) else []
    return list({id(leaf): leaf for part in (own, *below) for leaf in part}.values())


def _inputs_first(start: Node) -> list[Node]:
    """All nodes that the gradient reaches from `start`, each after those that it leads to."""
    below: dict[Node, list[Node]] = {}
    left = [start]
    while left:
        node = left.pop()
        below[node] = [next_node for next_node, _ in node.next_functions if next_node is not None]
        left += [one for one in below[node] if one not in below]
    return [*TopologicalSorter(below).static_order()]
