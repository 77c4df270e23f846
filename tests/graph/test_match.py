"""Patterns fit what they describe and nothing else."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from strata.graph.match import Call, Hole, find, match


def traced(function: Any) -> fx.GraphModule:
    class Module(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            return function(x, y)

    return fx.symbolic_trace(Module())


def ends(function: Any, pattern: Call) -> list[dict[str, Any]]:
    return list(find(traced(function), pattern))


SQUARE = Call(operator.mul, (Hole("a"), Hole("a")))


def test_a_name_stands_for_one_node() -> None:
    found = ends(lambda x, y: (x * x) + (x * y) + (y * y), SQUARE)
    assert [one["a"].name for one in found] == ["x", "y"]


def test_a_name_stands_for_one_value() -> None:
    pattern = Call("narrow", (Call("narrow", (Hole("x"), 0, 0, Hole("size"))), 0, 0, Hole("size")), "end")
    assert ends(lambda x, y: x.narrow(0, 0, 4).narrow(0, 0, 2), pattern) == []
    (found,) = ends(lambda x, y: x.narrow(0, 0, 4).narrow(0, 0, 4), pattern)
    assert found["size"] == 4
    assert found["end"].args[0] is not found["x"]


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


def test_read_once_refuses_a_second_reader() -> None:
    pattern = Call(operator.neg, (Call(operator.mul, (Hole("a"), Hole("b")), read_once=True),))

    def second_reader(x: Tensor, y: Tensor) -> Any:
        product = x * y
        return operator.neg(product), product

    assert len(ends(lambda x, y: operator.neg(x * y), pattern)) == 1
    assert ends(second_reader, pattern) == []


def test_what_is_known_before_must_hold() -> None:
    graph = traced(lambda x, y: x * x)
    x, y, product, _ = graph.graph.nodes
    assert match(SQUARE, product, {"a": x}) == {"a": x}
    assert match(SQUARE, product, {"a": y}) is None
    known = {"b": y}
    assert match(SQUARE, product, known) == {"a": x, "b": y}
    assert known == {"b": y}
