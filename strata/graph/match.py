"""Finding known shapes of computation in a graph: a pattern is a call whose arguments are patterns or values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Hole:
    """Any node or value; the same name stands for the same one wherever it occurs."""

    name: str


@dataclass(frozen=True)
class Call:
    """A call of `target` (a function, an operation, a method by its name) with positional arguments.

    name: what its node is called in a match. read_once: nothing but one node reads the result, so that it need not be
    computed any more once that one is replaced.
    """

    target: Any
    args: tuple[Any, ...]
    name: str = ""
    read_once: bool = False


Match = dict[str, Any]


def match(pattern: Call, node: fx.Node, known: Mapping[str, Any] | None = None) -> Match | None:
    """What the names of `pattern` stand for if it ends in `node`, with what was `known` before; None if it does not."""
    found = dict(known or {})
    return found if _fits(pattern, node, found) else None


def find(graph: fx.GraphModule, pattern: Call) -> Iterator[Match]:
    """All matches in order. The graph may be rewritten meanwhile, as long as the ends of other matches stay."""
    kind = "call_method" if isinstance(pattern.target, str) else "call_function"
    for node in graph.graph.find_nodes(op=kind, target=pattern.target):
        found = match(pattern, node)
        if found is not None:
            yield found


def _fits(pattern: Any, value: Any, found: Match) -> bool:
    if isinstance(pattern, Hole):
        return _same(found.setdefault(pattern.name, value), value)
    if isinstance(pattern, Call):
        return (
            isinstance(value, fx.Node)
            and value.target == pattern.target
            and not value.kwargs
            and not (pattern.read_once and len(value.users) > 1)
            and _fits(pattern.args, value.args, found)
            and (not pattern.name or _same(found.setdefault(pattern.name, value), value))
        )
    if isinstance(pattern, tuple):
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(pattern)
            and all(_fits(one, other, found) for one, other in zip(pattern, value, strict=True))
        )
    return _same(pattern, value)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))
