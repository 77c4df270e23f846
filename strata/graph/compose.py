"""Two traced graphs become one that computes them one after the other; one is copied."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import fx, nn

from strata.graph.deferred import DeferredGraph


def compose(graph: fx.GraphModule, head: fx.GraphModule) -> fx.GraphModule:
    """One graph that calls `head` with the result of `graph`, so that passes see across the seam between them.

    graph: Batch to hidden [tokens, hidden]; head: hidden to logits; both traced from one model (`trace`,
    `trace_head`) and neither merged nor bound. The result maps a Batch to logits of all its tokens, which are those
    that are wanted in a decode step. Both stay as they are and share their parameters with it; what both fetch, like a
    tied embedding, it fetches once.
    """
    joined = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    hidden = joined.graph_copy(graph.graph, copies)
    assert isinstance(hidden, fx.Node)
    fetched = {node.target: copy for node, copy in copies.items() if node.op == "get_attr"}
    given: dict[fx.Node, fx.Node] = {}
    for node in head.graph.nodes:
        if node.op == "placeholder":
            given[node] = hidden
        elif node.op == "get_attr" and node.target in fetched:
            given[node] = fetched[node.target]
    logits = joined.graph_copy(head.graph, given)
    return _finished(joined, logits, head, graph)


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """The same graph for other passes; it shares its parameters with `graph`, which stays as it is."""
    copy = fx.Graph()
    return _finished(copy, copy.graph_copy(graph.graph, {}), graph)


def _finished(graph: fx.Graph, result: Any, *parts: fx.GraphModule) -> fx.GraphModule:
    """parts: what it was made of, and fetches from."""
    output = graph.output(result)
    output.meta = {"module": "", "layer": None}
    attributes: dict[str, Any] = {
        name: attrgetter(name)(part)
        for part in parts
        for node in part.graph.nodes
        if node.op == "get_attr"
        # Of a packed weight, too, the parameter that it stands for.
        for name in (str(node.target), *node.meta.get("parameters", ()))
    }
    made = DeferredGraph(attributes, graph, class_name=type(parts[-1]).__name__)
    for name, value in attributes.items():  # torch leaves out what no node fetches
        owner, _, last = name.rpartition(".")
        if isinstance(value, nn.Parameter) and not hasattr(holder := made.get_submodule(owner), last):
            holder.register_parameter(last, value)
    return made
