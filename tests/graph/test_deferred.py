"""The code of a graph is made once for many passes, and always that of the graph as it is."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from strata.graph.bind import bind
from strata.graph.capture import capture
from strata.graph.deferred import DeferredGraph


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs whose code has been made, in order."""
    found: list[fx.GraphModule] = []
    real = fx.GraphModule.recompile

    def recompile(self: fx.GraphModule) -> object:
        found.append(self)
        return real(self)

    monkeypatch.setattr(fx.GraphModule, "recompile", recompile)
    return found


def make_product(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.target = operator.mul
    graph.recompile()


def test_a_call_runs_the_graph_as_it_is(made: list[fx.GraphModule]) -> None:
    graph, x = capture(Doubled()), torch.tensor(3.0)
    assert made == []
    assert graph(x) == graph.forward(x) == 6
    assert made == [graph]
    make_product(graph)
    make_product(graph)
    assert made == [graph]
    assert graph.forward(x) == graph(x) == 9
    assert made == [graph, graph]


def test_graphs_are_apart() -> None:
    first, second, x = capture(Doubled()), capture(Doubled()), torch.tensor(5.0)
    make_product(second)
    assert (first(x), second(x)) == (10, 25)
    assert "x * x" in second.code
    assert "x + x" in first.code


def test_a_bound_graph_is_ready(made: list[fx.GraphModule]) -> None:
    graph = bind(capture(Doubled()), "cpu")
    assert isinstance(graph, DeferredGraph)
    assert made == [graph]
    graph(torch.ones(1))
    assert made == [graph]
