"""One graph for every batch, whose nodes know where they come from; code made once; patterns fit what they say."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from strata.graph.bind import bind
from strata.graph.deferred import DeferredGraph
from strata.graph.match import Call, Hole, find, match
from strata.graph.merge import merge
from strata.graph.trace import trace, trace_head
from strata.hardware.roofline import Cost
from strata.kernels.linear.linear import linear
from strata.kernels.op import Operation
from strata.models.batch import Batch

from .tiny import LAYERS, Tiny, packed

writes = Operation("writes", lambda x: x, cost=lambda x, workload: Cost(), meta=lambda x: x, mutates=("x",))


def test_one_graph_serves_any_batch() -> None:
    torch.manual_seed(0)
    model = Tiny()
    graph = trace(model)
    for lengths in ((1,), (5, 3), (2, 9, 4)):
        batch = packed(*lengths)
        torch.testing.assert_close(graph(batch), model(batch), rtol=0, atol=0)


def test_head_is_a_graph_of_its_own() -> None:
    model = Tiny()
    hidden = torch.randn(3, model.lm_head.weight.shape[1])
    torch.testing.assert_close(trace_head(model)(hidden), hidden @ model.lm_head.weight.T)


def test_nodes_know_module_and_layer() -> None:
    nodes = [node for node in trace(Tiny()).graph.nodes if node.op == "call_function"]
    named = {node.meta["module"]: node.meta["layer"] for node in nodes if node.target is linear}
    assert named["layers.1.down_proj"] == 1
    assert named["layers.0.q_proj"] == 0
    assert {node.meta["layer"] for node in nodes} == {None, *range(LAYERS)}


def test_each_attribute_and_parameter_is_fetched_once() -> None:
    nodes = trace(Tiny()).graph.nodes
    attributes = [node.args[1] for node in nodes if node.target is getattr]
    assert sorted(attributes) == ["pages", "tokens"]
    parameters = [node.target for node in nodes if node.op == "get_attr"]
    assert len(parameters) == len(set(parameters)) == 2 + 9 * LAYERS


def test_a_constant_tensor_is_refused() -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return linear(x, torch.ones(3, 4), None)

    with pytest.raises(ValueError, match="neither a parameter nor a buffer"):
        trace(Constant())


@pytest.mark.parametrize("deterministic", [False, True])
def test_bound_graph_runs_and_can_be_bound_again(deterministic: bool) -> None:
    torch.manual_seed(0)
    model = Tiny()
    batch = packed(4, 6)
    expected = model(batch)
    graph = bind(merge(trace(model)), "cpu", deterministic)
    assert not any(isinstance(node.target, Operation) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(batch), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(bind(graph, "cpu")(batch), expected, rtol=2e-5, atol=2e-5)


class Affine(nn.Module):
    """x @ weight^T."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, None)


class Named(nn.Module):
    """Modules whose parameters differ by a dot and an underline, and one with the name of a graph's own attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Module()
        self.a.b = Affine()
        self.a_b = Affine()
        self.a_b_weight = nn.Parameter(torch.randn(4, 4))
        self.print = nn.Module()
        self.print.readable = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = linear(self.a_b(self.a.b(x)), self.a_b_weight, None)
        return linear(self.a.b(x), self.print.readable, None)


def test_names_that_differ_by_a_dot_alone_stay_apart() -> None:
    model, x = Named(), torch.randn(3, 4)
    expected = model(x)
    graph = bind(trace(model), "cpu")
    torch.testing.assert_close(graph(x), expected)
    assert callable(graph.print_readable), "torch's own method of a graph"
    torch.testing.assert_close(bind(graph, "cpu")(x), expected)


def test_dead_operations_go_but_writes_stay() -> None:
    class Writes(nn.Module):
        def forward(self, batch: Batch) -> Tensor:
            writes(batch.tokens)
            linear(batch.tokens, batch.tokens, None)
            return batch.tokens

    targets = [node.target for node in trace(Writes()).graph.nodes]
    assert writes in targets
    assert linear not in targets


def test_missing_invariant_implementation_is_named() -> None:
    class Writes(nn.Module):
        def forward(self, batch: Batch) -> Tensor:
            return writes(batch.tokens)

    with pytest.raises(NotImplementedError, match="writes has no batch-invariant implementation for cpu"):
        bind(trace(Writes()), "cpu", deterministic=True)


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
    graph, x = trace(Doubled()), torch.tensor(3.0)
    assert made == []
    assert graph(x) == graph.forward(x) == 6
    assert made == [graph]
    make_product(graph)
    make_product(graph)
    assert made == [graph]
    assert graph.forward(x) == graph(x) == 9
    assert made == [graph, graph]


def test_graphs_are_apart() -> None:
    first, second, x = trace(Doubled()), trace(Doubled()), torch.tensor(5.0)
    make_product(second)
    assert (first(x), second(x)) == (10, 25)
    assert "x * x" in second.code
    assert "x + x" in first.code


def test_a_bound_graph_is_ready(made: list[fx.GraphModule]) -> None:
    graph = bind(trace(Doubled()), "cpu")
    assert isinstance(graph, DeferredGraph)
    assert made == [graph]
    graph(torch.ones(1))
    assert made == [graph]


def traced(function: Any) -> fx.GraphModule:
    class Module(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return function(x, y)

    return fx.symbolic_trace(Module())


def ends(function: Any, pattern: Call) -> list[dict[str, Any]]:
    return list(find(traced(function), pattern))


SQUARE = Call(operator.mul, (Hole("a"), Hole("a")))


def test_values_must_be_equal_and_of_one_type() -> None:
    pattern = Call("unflatten", (Hole("x"), -1, (-1, 8)))
    assert len(ends(lambda x, y: x.unflatten(-1, (-1, 8)), pattern)) == 1
    for other in ((-1, 4), (-1, 8, 1), 8, (-1, 8.0)):
        assert ends(lambda x, y, other=other: x.unflatten(-1, other), pattern) == []


def test_a_call_has_no_other_arguments() -> None:
    pattern = Call("softmax", (Hole("x"), -1))
    assert len(ends(lambda x, y: x.softmax(-1), pattern)) == 1
    assert ends(lambda x, y: x.softmax(-1, dtype=torch.float64), pattern) == []
    assert ends(lambda x, y: x.softmax(-1, torch.float64), pattern) == []


def test_what_is_known_before_must_hold() -> None:
    graph = traced(lambda x, y: x * x)
    x, y, product, _ = graph.graph.nodes
    assert match(SQUARE, product, {"a": x}) == {"a": x}
    assert match(SQUARE, product, {"a": y}) is None
    known = {"b": y}
    assert match(SQUARE, product, known) == {"a": x, "b": y}
    assert known == {"b": y}
