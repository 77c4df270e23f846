"""Graphs whose Python code is made when it is wanted."""

from __future__ import annotations

from typing import Any

from torch import fx


class DeferredGraph(fx.GraphModule):
    """A graph module that makes its code when it is first called, and not after each pass that rewrites it.

    `make_code` makes it at once, so that the first call takes no longer than the next.
    """

    def recompile(self) -> Any:
        """Forget the code; torch calls this when it puts a graph in place."""
        type(self).forward = _make_code_and_call

    def make_code(self) -> None:
        super().recompile()

    @property
    def code(self) -> str:
        self.make_code()
        return super().code


def _make_code_and_call(self: DeferredGraph, *args: Any) -> Any:
    self.make_code()
    return self.forward(*args)


def make_code(graph: fx.GraphModule) -> None:
    """Make the code of a graph that is finished."""
    if isinstance(graph, DeferredGraph):
        graph.make_code()
    else:
        graph.recompile()
