"""The operations of a graph become the implementations that run them on one kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import fx

from strata.comm.mesh import Axis
from strata.comm.operations import Along
from strata.graph.deferred import make_code
from strata.graph.trace import operation_of
from strata.kernels.op import has_quantized

NO_AXES: Mapping[str, Axis | Along] = MappingProxyType({})


def bind(
    graph: fx.GraphModule,
    device: str,
    deterministic: bool = False,
    axes: Mapping[str, Axis | Along] = NO_AXES,
) -> fx.GraphModule:
    """Replace, in place, each operation by its binding for `device` (see `Operation.bind`); returns `graph`.

    `deterministic` leaves only implementations whose bits do not depend on the rest of the batch. axes: for the
    collectives, the live axis of each name; or an `Along` in a graph that is costed and not run. A bound graph can be
    bound again. Raises NotImplementedError, naming the operation, if nothing can run it there, and ValueError if a
    collective's axis is not among `axes` or has another size there.
    """
    for node in graph.graph.nodes:
        operation = operation_of(node)
        if operation is None:
            continue
        bound = operation.bind(device, deterministic=deterministic, packed=has_quantized(node.args))
        if not bound.candidates:
            kind = "batch-invariant " if deterministic else ""
            raise NotImplementedError(f"operation {operation.name} has no {kind}implementation for {device}")
        node.meta["bound"] = bound
        first = bound.candidates[0]
        direct = first.supports is None and operation.operands is None
        node.target = first.run if direct else bound  # without a choice to make, without its cost
    _fetch_directly(graph)
    _make_once(graph, axes)
    make_code(graph)
    return graph


def _fetch_directly(graph: fx.GraphModule) -> None:
    """Let each parameter be one plain attribute: a dotted path costs a search in each module on the way."""
    names: dict[str, str] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr" and "." in node.target:
            if node.target not in names:
                names[node.target] = _plain_attribute(graph, node.target)
            node.target = names[node.target]


def _make_once(graph: fx.GraphModule, axes: Mapping[str, Axis | Along]) -> None:
    """Let each named tuple of constants be an attribute too: the code of a graph would make it anew in every call.

    The attribute of an `Along` is the axis of that name.
    """
    for node in list(graph.graph.nodes):
        for index, argument in enumerate(node.args):
            named = isinstance(argument, tuple) and hasattr(argument, "_fields")
            if named and not any(isinstance(value, fx.Node) for value in argument):
                value = _axis_of(node, argument, axes) if isinstance(argument, Along) else argument
                with graph.graph.inserting_before(node):
                    made = graph.graph.create_node("get_attr", _attribute(graph, node.name, value))
                made.meta = {"module": node.meta["module"], "layer": node.meta["layer"]}
                node.update_arg(index, made)


def _axis_of(node: fx.Node, along: Along, axes: Mapping[str, Axis | Along]) -> Axis | Along:
    axis = axes.get(along.axis)
    if axis is not None and axis.size == along.size:
        return axis
    had = f"one of {axis.size}" if axis is not None else ", ".join(axes) or "none"
    raise ValueError(
        f"{node.name} (in {node.meta['module'] or 'the model'}) needs the axis {along.axis!r} of {along.size} ranks, "
        f"and bind was given {had}; hand it over as axes={{{along.axis!r}: ...}}"
    )


def _plain_attribute(graph: fx.GraphModule, path: str) -> str:
    owner, _, last = path.rpartition(".")
    return _attribute(graph, path.replace(".", "_"), getattr(graph.get_submodule(owner), last))


def _attribute(graph: fx.GraphModule, name: str, value: Any) -> str:
    """Make a value an attribute of the graph, under a name that nothing else has (`a.b` may meet `a_b`)."""
    while hasattr(graph, name):
        name += "_"
    graph.__dict__[name] = value
    return name
