"""What the nodes of a graph read, and in which precision: results of other nodes, weights, cached keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from torch import Tensor, fx

from strata.kernels.quant.packed import PackedWeight
from strata.kernels.state.paged import PagedKV


class Read(NamedTuple):
    """source: the node that made a "result"; empty for others. precision: a dtype, or the kind of a packed weight's
    values. nbytes: of all weights in that precision; 0 for others."""

    kind: Literal["result", "weight", "cache"]
    source: str
    precision: str
    nbytes: int = 0


class Reads:
    """Follows the values of a graph, whose nodes are told in order, through views to the nodes that made them."""

    def __init__(self) -> None:
        self._makers: dict[fx.Node, tuple[str, ...]] = {}

    def look(self, node: fx.Node, args: tuple[Any, ...], *, works: bool) -> tuple[Read, ...]:
        """What a node reads, each once. args: its arguments' values. works: it does; others only view memory."""
        found: dict[Read, int] = {}
        for one, value in zip(node.args, args, strict=True):
            for read in self._of(one, value):
                key = read._replace(nbytes=0)
                found[key] = found.get(key, 0) + read.nbytes
        makers = (node.name,) if works else tuple(read.source for read in found if read.kind == "result")
        self._makers[node] = makers
        return tuple(read._replace(nbytes=nbytes) for read, nbytes in found.items())

    def _of(self, argument: Any, value: Any) -> Iterator[Read]:
        pages = value if isinstance(value, PagedKV) else getattr(value, "pages", None)
        if isinstance(value, PackedWeight):
            yield Read("weight", "", value.kind, value.nbytes)
        elif isinstance(argument, fx.Node):
            first = value[0] if isinstance(value, tuple) and value and isinstance(value[0], Tensor) else value
            precision = str(first.dtype).removeprefix("torch.") if isinstance(first, Tensor) else ""
            if argument.meta.get("parameters"):
                yield Read("weight", "", precision, value.nbytes)
            for maker in self._makers.get(argument, ()):
                yield Read("result", maker, precision)
            if isinstance(pages, PagedKV) and pages.keys:
                yield Read("cache", "", str(pages.keys[0].dtype).removeprefix("torch."))
        elif isinstance(argument, (tuple, list)):
            for one, inner in zip(argument, value, strict=True):
                yield from self._of(one, inner)
