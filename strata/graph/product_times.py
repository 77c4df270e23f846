"""How long the products of a layer take for a number of rows, as far as a device's table of tuned kernels tells."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from operator import attrgetter

from torch import Tensor, fx

from strata.graph.trace import operation_of
from strata.kernels import tuned

# A norm or a gating between two products, 64 to 256 rows of the 0.6B and the 8B shape on an H200: 2.0 to 3.9 us.
_BETWEEN_SECONDS = 2.5e-6


@dataclass(frozen=True)
class Products:
    """The kinds of products in a layer, each listed for one row with how often it occurs; norms and gatings apart from
    them."""

    counts: Counter[tuned.Key]
    between: int


def products_of(graph: fx.GraphModule) -> Products:
    """The products of a graph's last layer by one weight [out, width] each, bound or not, fused or not.

    One layer stands for all, so that a model with fewer of them tells the same.
    """
    called = [(node, operation) for node in graph.graph.nodes if (operation := operation_of(node)) is not None]
    last = max((node.meta["layer"] for node, _ in called if node.meta["layer"] is not None), default=None)
    counts: Counter[tuned.Key] = Counter()
    between = 0
    for node, operation in called:
        if node.meta["layer"] != last:
            continue
        weights = [weight for weight in _parameters(graph, node) if weight.dim() == 2]
        if operation.dense and len(weights) == 1:
            dtype = str(weights[0].dtype).removeprefix("torch.")
            out, width = weights[0].shape
            counts[tuned.Key(operation.tuned_as or operation.name, dtype, out, width, rows=1)] += 1
        elif operation.fusible:
            between += 1
    return Products(counts, between)


def measured_seconds(products: Products, rows: int, table: tuned.Table) -> float | None:
    """The seconds of products of so many rows and of what is between them; None if the table lacks one of them."""
    total = products.between * _BETWEEN_SECONDS
    for key, count in products.counts.items():
        choice = tuned.serving(table, replace(key, rows=rows))
        if choice is None:
            return None
        total += count * choice.seconds
    return total


def _parameters(graph: fx.GraphModule, node: fx.Node) -> list[Tensor]:
    inputs = (attrgetter(str(one.target))(graph) for one in node.all_input_nodes if one.op == "get_attr")
    return [value for value in inputs if isinstance(value, Tensor)]
