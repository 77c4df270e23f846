"""A traced graph is cut at the borders of layers into the stages of a pipeline, each for the ranks of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx, nn

from strata.comm.operations import Along, receive_previous, send_next
from strata.graph.deferred import DeferredGraph
from strata.graph.rewrite import insert_after, insert_before, replace
from strata.graph.trace import must_stay, operation_of, trace, trace_head
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.latent_write import latent_write


def trace_stage(
    model: nn.Module, first: int, end: int, holder: nn.Module
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """The layers [first, end) of a model as a graph (see `stage`), and of the last ones its head.

    model: the whole one, which may be on the meta device. holder: what has the parameters of the stage.
    """
    graph = trace(model)
    own = stage(graph, first, end, holder)
    layers = 1 + max(
        (node.meta["layer"] for node in graph.graph.nodes if node.meta.get("layer") is not None), default=-1
    )
    if end < layers:
        return own, None
    head = trace_head(model)
    return own, DeferredGraph(holder, head.graph, class_name=type(head).__name__)


def stage(graph: fx.GraphModule, first: int, end: int, holder: nn.Module) -> fx.GraphModule:
    """The layers [first, end) of a model as a graph of their own; `graph` stays as it is.

    graph: Batch to hidden [tokens, hidden], captured and not rewritten by a pass yet, of a model that may be on the
    meta device. holder: what has the parameters of the stage, under the names of the whole model.

    The first stage begins with the embedding and the last ends with the last norm. Any other takes, after the Batch,
    the hidden states [tokens, hidden] that the stage before returns. What depends on no parameter, like the angles of
    rotary positions, is computed by each stage. The KV pools of a stage begin with its first layer; `meta` has the
    numbers of the whole model.

    Raises ValueError if there are no such layers, or more than one value passes from layer to layer.
    """
    nodes = list(graph.graph.nodes)
    computed = _computed(nodes)
    layers = 1 + max((node.meta["layer"] for node in computed if node.meta.get("layer") is not None), default=-1)
    if not 0 <= first < end <= layers:
        raise ValueError(f"a stage of layers {first} to {end} does not lie within the {layers} layers of the model")
    begin = _border(nodes, computed, first) if first else 0
    stop = _border(nodes, computed, end) if end < layers else len(nodes)
    entering = _crossing(nodes, computed, begin) if first else None
    leaving = _crossing(nodes, computed, stop) if end < layers else nodes[-1].args[0]
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for place, node in enumerate(nodes):
        if node.op == "output" or (node in computed and not begin <= place < stop):
            continue
        copies[node] = part.node_copy(node, copies.__getitem__)
        if node.op == "placeholder" and entering is not None:
            copies[entering] = part.placeholder("hidden")
            copies[entering].meta = {"module": "", "layer": None}
        _renumber(copies[node], first)
    assert isinstance(leaving, fx.Node)
    part.output(copies[leaving]).meta = {"module": "", "layer": None}
    part.eliminate_dead_code(is_impure_node=must_stay)
    return DeferredGraph(holder, part, class_name=type(graph).__name__)


def exchange(graph: fx.GraphModule, along: Along, index: int, width: int, dtype: torch.dtype) -> fx.GraphModule:
    """Let the hidden states of stage `index` come from the one before it along `along` and go to the one after it.

    graph: of `stage`, rewritten in place to take a Batch alone; it still returns what it hands on. width: elements of a
    hidden state. Returns `graph`.
    """
    batch, *hidden = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for given in hidden:
        positions = insert_after(given, getattr, batch, "positions")
        replace(given, insert_after(positions, receive_previous, positions, along, width, dtype))
    if index + 1 < along.size:
        output = next(node for node in graph.graph.nodes if node.op == "output")
        made = output.args[0]
        assert isinstance(made, fx.Node)
        output.args = (insert_before(output, send_next, made, along, of=made),)
    graph.recompile()
    return graph


def take_rows(graph: fx.GraphModule) -> fx.GraphModule:
    """Let the graph of a stage before the last take a second argument, as `gather_after_attention` lets the last one.

    It leaves no rows out: the stages after it attend to all tokens. In place; returns `graph`.
    """
    argument = next(node for node in graph.graph.nodes if node.op == "placeholder")
    with graph.graph.inserting_after(argument):
        graph.graph.placeholder("rows").meta = dict(argument.meta)
    graph.recompile()
    return graph


def _computed(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What depends on a parameter."""
    found: set[fx.Node] = set()
    for node in nodes:
        if any(source in found or source.meta.get("parameters") for source in node.all_input_nodes):
            found.add(node)
    return found


def _border(nodes: Sequence[fx.Node], computed: set[fx.Node], layer: int) -> int:
    """Where a layer begins."""
    return next(
        place
        for place, node in enumerate(nodes)
        if node in computed and node.meta.get("layer") is not None and node.meta["layer"] >= layer
    )


def _crossing(nodes: Sequence[fx.Node], computed: set[fx.Node], border: int) -> fx.Node:
    """The one value that is computed before a border and read behind it."""
    before = computed.intersection(nodes[:border])
    read = {source: None for node in nodes[border:] for source in node.all_input_nodes if source in before}
    if len(read) != 1:
        names = ", ".join(node.name for node in read) or "nothing"
        raise ValueError(f"a stage can begin where one value passes from layer to layer, and here pass: {names}")
    return next(iter(read))


def _renumber(node: fx.Node, first: int) -> None:
    """Let a node write and read the pools of the stage, of which the first is that of layer `first`."""
    if operation_of(node) is kv_write:
        keys, values, pages, layer = node.args
        assert isinstance(layer, int)
        node.args = (keys, values, pages, layer - first)
    if operation_of(node) is latent_write:
        *front, layer, paired = node.args
        assert isinstance(layer, int)
        node.args = (*front, layer - first, paired)
    node.args = tuple(
        given._replace(layer=given.layer - first) if isinstance(given, AttentionSpec) else given for given in node.args
    )
