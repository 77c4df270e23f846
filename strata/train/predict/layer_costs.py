"""The arithmetic of a model's layers, from the graph that is captured of it: the costs that inference takes, too."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.graph.capture import capture
from strata.graph.cost import NodeCost, meta_indices, node_costs
from strata.hardware.roofline import Workload
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.families import build


@dataclass(frozen=True)
class LayerCost:
    """FLOPs of a layer's forward pass: of a token in products outside experts (dense), in router and experts, and of a
    whole sequence in attention.
    """

    dense: int
    routed: int
    attention: int


def layer_costs(config: ModelConfig, length: int) -> tuple[LayerCost, ...]:
    """Of each layer, with sequences of so many tokens. Whatever is neither a product nor attention does not count."""
    kinds = config.layer_kinds
    unlike = list(dict.fromkeys(kinds))  # a layer of each kind tells of all
    of_unlike = _unlike_costs(config.with_layers([kinds.index(kind) for kind in unlike]), length)
    return tuple(of_unlike[unlike.index(kind)] for kind in kinds)


def _unlike_costs(config: ModelConfig, length: int) -> tuple[LayerCost, ...]:
    with torch.device("meta"):
        graph = capture(build(config).to(torch.bfloat16))
    found = [[0, 0, 0] for _ in range(config.num_layers)]
    for node in _nodes(graph, 1):
        if node.layer is not None and node.operation == "linear":
            found[node.layer][_is_router(config, node)] += node.cost.flops
        elif node.layer is not None and node.operation == "experts":
            # Beside products they activate and add up. A token is multiplied by as many elements as it reads.
            found[node.layer][1] += 2 * node.cost.weights // torch.bfloat16.itemsize
    for node in _nodes(graph, length):
        if node.layer is not None and node.operation == "attention":
            found[node.layer][2] += node.cost.flops
    return tuple(LayerCost(dense, routed, attention) for dense, routed, attention in found)


def _nodes(graph: torch.fx.GraphModule, tokens: int) -> list[NodeCost]:
    """Of one sequence of so many tokens."""
    ids = meta_indices(tokens)
    return node_costs(graph, Batch(ids, ids, meta_indices(2), tokens, None), Workload((tokens,), (tokens,)))


def _is_router(config: ModelConfig, node: NodeCost) -> bool:
    """Whether it is the product that chooses among experts."""
    mixture = config.experts
    return mixture is not None and node.weight == (mixture.count, config.hidden_size)
