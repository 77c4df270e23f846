"""Precisions of weights and of keys and values that Strata does not serve in yet: what steps would take in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strata.graph.cost import NodeCost
from strata.hardware.roofline import Cost


@dataclass(frozen=True)
class Precision:
    """name: of weights and of keys and values. weights, cached: bytes of the layers' weights, and of keys and values,
    over those of the checkpoint's dtype. compute: the dtype in which products are computed, None: the checkpoint's.
    """

    name: str
    weights: float = 1.0
    cached: float = 1.0
    compute: str | None = None

    def cost(self, node: NodeCost) -> Cost:
        """Of a node, with what it reads of weights, keys and values in this precision."""
        cost = node.cost
        saved_weights = int(cost.weights * (1 - self.weights)) if _is_layer_product(node) else 0
        saved_cached = 0 if node.is_recurrent else int(cost.cached * (1 - self.cached))
        if not saved_weights and not saved_cached:
            return cost
        read = max(0, cost.read - saved_weights - saved_cached)
        return replace(cost, read=read, weights=cost.weights - saved_weights, cached=cost.cached - saved_cached)

    def dtype_of(self, node: NodeCost, dtype: str) -> str:
        """In which a node is computed of a model in `dtype`."""
        return self.compute if self.compute is not None and _is_layer_product(node) else dtype


AS_CHECKPOINT = Precision("as the checkpoint")
# int4 in groups of 128 with a scale of 16 bits each: 4.125 bits a weight, multiplied in the checkpoint's dtype.
PRECISIONS = (
    AS_CHECKPOINT,
    Precision("fp8 weights", weights=0.5, compute="float8"),
    Precision("fp8 weights and KV", weights=0.5, cached=0.5, compute="float8"),
    Precision("int4 weights", weights=4.125 / 16),
)


def _is_layer_product(node: NodeCost) -> bool:
    """Whether a node multiplies by weights of a layer: embedding and head keep the checkpoint's dtype."""
    return node.layer is not None and node.cost.weights > 0 and node.cost.flops > 0
