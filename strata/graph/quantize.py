"""Weights of a traced graph give way to packed ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, fx

from strata.graph.rewrite import fetch
from strata.graph.trace import operation_of
from strata.kernels.quant.quantized import QuantizedWeight


def quantize(graph: fx.GraphModule, packed: Mapping[str, QuantizedWeight]) -> fx.GraphModule:
    """Let products multiply by the packed weights of these parameters, in place; returns `graph`.

    graph: captured, and not merged yet. packed: by the parameter that each stands for, of its shape; those that the
    graph does not fetch are passed over. The graph reads their memory, so that what is written there counts in its next
    call; the parameters themselves are not read any more and may be without memory.
    Raises ValueError if something else than a product reads one of them, or if a shape is another.
    """
    for node in list(graph.graph.nodes):
        names = node.meta.get("parameters", ())
        if node.op == "get_attr" and len(names) == 1 and names[0] in packed:
            _replace(graph, node, packed[names[0]])
    graph.recompile()
    return graph


def weights_of_products(graphs: Iterable[fx.GraphModule]) -> tuple[str, ...]:
    """Parameters that graphs, captured and not merged yet, read as weights of products alone, in their order."""
    found: dict[str, None] = {}
    others: set[str] = set()
    for graph in graphs:
        for node in graph.graph.nodes:
            if node.op != "get_attr" or not node.meta.get("parameters"):
                continue
            if all(_reads_weight(user, node) for user in node.users):
                found[node.target] = None
            else:
                others.add(node.target)
    return tuple(name for name in found if name not in others)


def _reads_weight(user: fx.Node, weight: fx.Node) -> bool:
    """Whether a node multiplies its activations by the weight, and does nothing else with it."""
    operation = operation_of(user)
    places = operation.packable if operation is not None else ()
    read = [place for place, argument in enumerate(user.args) if argument is weight]
    return bool(read) and all(place in places for place in read)


def _replace(graph: fx.GraphModule, node: fx.Node, weight: QuantizedWeight) -> None:
    parameter = graph.get_parameter(str(node.target))
    if weight.shape != parameter.shape:
        raise ValueError(f"{node.target} is {list(parameter.shape)}, and was packed as {list(weight.shape)}")
    for user in node.users:
        if not _reads_weight(user, node):
            raise ValueError(f"{user.name} reads {node.target} and is no product; leave that parameter as it is")
    fetched = weight.with_tensors(_fetch(graph, node, weight.tensors))
    for user in list(node.users):
        user.args = tuple(fetched if argument is node else argument for argument in user.args)
    graph.graph.erase_node(node)


def _fetch(graph: fx.GraphModule, node: fx.Node, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Nodes that fetch the tensors of a weight, which become buffers beside the parameter; the values bear its name."""
    names = node.meta["parameters"]
    return {
        name: fetch(graph, node, f"{node.target}_{name}", tensor, node, names if name == "values" else ())
        for name, tensor in tensors.items()
    }
