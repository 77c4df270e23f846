"""Another way to run a graph, for comparison: torch.compile makes kernels of what the references of its operations say.

What torch.compile cannot or should not look into stays as it is bound: attention over pages and recurrences, operations
that write in place, and experts, whose references ask the device how many rows each has. Between these lie pieces, as
in PyTorch's and vLLM's piecewise compilation; a layer's pieces are those of the next, and are compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from strata.graph.trace import operation_of
from strata.kernels.op import has_quantized
from strata.kernels.state.groups import of_group


def compiled(graph: fx.GraphModule, backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """What computes the same as a bound graph, of one rank. backend: of torch.compile.

    Compiles when it is called with sizes of a new kind: the first, another number of tokens, and one token.
    """
    return _Pieces(graph, backend).outer()


@dataclass(frozen=True, eq=False)
class _Piece:
    """Compiled operations that follow one another, as a function that a graph can call."""

    run: Callable[..., Any]

    @property
    def __name__(self) -> str:  # of which torch.fx makes the graph's code
        return "compiled_piece"

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)


class _Pieces:
    """Divides a graph into pieces, and calls of what stays as it is."""

    def __init__(self, graph: fx.GraphModule, backend: str | Callable[..., Any]) -> None:
        self._graph, self._backend = graph, backend
        self._outer = fx.Graph()
        self._values: dict[fx.Node, fx.Node] = {}  # of the graph's nodes, in the outer one
        self._waiting: dict[fx.Node, None] = {}  # of the piece that is gathered
        self._made: dict[tuple[Any, ...], _Piece] = {}

    def outer(self) -> Callable[..., Any]:
        for node in self._graph.graph.nodes:
            if _is_compiled(node):
                self._waiting[node] = None
                continue
            if any(source in self._waiting for source in node.all_input_nodes):
                self._end_piece()
            self._values[node] = self._outer.node_copy(node, self._values.__getitem__)
        names = (str(node.target) for node in self._outer.find_nodes(op="get_attr"))
        made = fx.GraphModule({name: getattr(self._graph, name) for name in names}, self._outer)
        forward: Callable[..., Any] = made.forward
        return forward

    def _end_piece(self) -> None:
        """Compile what waits, and call it."""
        piece, inner = list(self._waiting), fx.Graph()
        own: dict[fx.Node, Any] = {}
        read = dict.fromkeys(one for node in piece for one in node.all_input_nodes if one not in self._waiting)
        fetched = {one: getattr(self._graph, str(one.target)) for one in read if one.op == "get_attr"}
        constants = {one: value for one, value in fetched.items() if not isinstance(value, Tensor)}
        given = [one for one in read if one not in constants]
        for number, source in enumerate(given):
            own[source] = inner.placeholder(f"given_{number}")
        own |= constants
        for node in piece:
            operation = operation_of(node)
            if operation is None:
                own[node] = inner.node_copy(node, own.__getitem__)
            else:
                args = fx.map_arg(node.args, own.__getitem__)
                own[node] = inner.call_function(operation.reference, args)
        results = [node for node in piece if any(user not in self._waiting for user in node.users)]
        inner.output(tuple(own[node] for node in results))
        shapes = [value.shape for value in fetched.values() if isinstance(value, Tensor)]
        call = self._outer.call_function(
            self._compiled(inner, str(shapes)), tuple(self._values[source] for source in given)
        )
        for place, node in enumerate(results):
            self._values[node] = self._outer.call_function(_take, (call, place))
        self._waiting.clear()

    def _compiled(self, piece: fx.Graph, shapes: str) -> _Piece:
        """The same for pieces that do the same with weights of the same shapes."""
        numbers = {node: number for number, node in enumerate(piece.nodes)}
        key = tuple(
            (
                node.op,
                node.target if node.op.startswith("call") else "",
                repr(fx.map_arg(node.args, numbers.__getitem__)),
            )
            for node in piece.nodes
        )
        if (shapes, *key) not in self._made:
            module = fx.GraphModule({}, piece)
            self._made[shapes, *key] = _Piece(torch.compile(module, backend=self._backend, fullgraph=True))
        return self._made[shapes, *key]


def _take(results: tuple[Any, ...], place: int) -> Any:
    return results[place]


def _is_compiled(node: fx.Node) -> bool:
    """Whether a node is part of a piece; others are fetches, and what stays as it is bound."""
    if node.op not in ("call_function", "call_method") or node.target in (getattr, of_group):
        return False
    operation = operation_of(node)
    if operation is None:
        return True
    stays = operation.mutates or operation.reads_state or operation.collective or operation.mixture
    return not stays and not has_quantized(node.args)
