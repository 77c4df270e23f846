"""Looking at the calls of graphs, and of their nodes, while an engine runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import fx


@contextmanager
def replaced(
    graphs: Mapping[str, fx.GraphModule], call: Callable[[str, fx.GraphModule], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, a graph runs what `call` makes of its name and of it."""
    made = [(graph, call(name, graph)) for name, graph in graphs.items()]
    for graph, run in made:
        graph.forward = run
    try:
        yield
    finally:
        for graph, _ in made:
            graph.__dict__.pop("forward", None)  # the class's own is behind it


class TimedNodes(fx.Interpreter):
    """Runs a graph node by node. note: is told of each how many seconds of `clock` it took."""

    def __init__(
        self, module: fx.GraphModule, clock: Callable[[], float], note: Callable[[fx.Node, float], None]
    ) -> None:
        super().__init__(module)
        self._clock, self._note = clock, note

    def run_node(self, n: fx.Node) -> Any:
        began = self._clock()
        result = super().run_node(n)
        self._note(n, self._clock() - began)
        return result
