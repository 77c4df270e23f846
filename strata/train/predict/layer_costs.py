"""The work of a model's layers, forward and backward, from the graph that is traced of it: the costs that inference
takes, too."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

from strata.cost.nodes import NodeCost, node_costs
from strata.graph.fuse import fuse
from strata.graph.merge import merge
from strata.graph.trace import trace
from strata.graph.walk import meta_indices
from strata.hardware.roofline import Cost, Workload
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.families import build

# Tokens for which nodes are asked: of what they cost beside weights, each token has its share.
_TOKENS = 1024
# What attention launches before and behind its own kernels in the backward pass (cuDNN).
_AROUND_ATTENTION = 3


@dataclass(frozen=True)
class PassCost:
    """One pass through a layer.

    dense, routed: FLOPs of a token in products outside experts, and in router and experts. attention: FLOPs of a whole
    sequence. between, inside: bytes that a token's activations move through memory beside products and attention, as
    hidden states (norms, sums), and all others (rotation, activation, routing). operands: elements of a token that
    dense products read, or gradients of what they wrote. moved: bytes of a token that products read and write, beside
    weights: bytes of these. attended: bytes that attention reads and writes, of a whole sequence. kernels: launches.
    """

    dense: int = 0
    routed: int = 0
    attention: int = 0
    between: int = 0
    inside: int = 0
    operands: int = 0
    moved: int = 0
    weights: int = 0
    attended: int = 0
    kernels: int = 0

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class LayerCost:
    """Both passes through a layer."""

    forward: PassCost
    backward: PassCost


# A search asks for the same layers under many layouts.
@lru_cache(maxsize=64)
def layer_costs(config: ModelConfig, length: int, *, fused: bool = True) -> tuple[LayerCost, ...]:
    """Of each layer, with sequences of so many tokens. fused: of the merged and fused graph; else of the modules."""
    kinds = config.layer_kinds
    unlike = list(dict.fromkeys(kinds))  # a layer of each kind tells of all
    # The first layer's norm has no sum before it, so a layer more goes ahead.
    chosen = config.with_layers([0, *(kinds.index(kind) for kind in unlike)])
    of_unlike = _unlike_costs(chosen, length, fused)[1:]
    return tuple(of_unlike[unlike.index(kind)] for kind in kinds)


def _unlike_costs(config: ModelConfig, length: int, fused: bool) -> tuple[LayerCost, ...]:
    with torch.device("meta"):
        graph = trace(build(config).to(torch.bfloat16))
    if fused:
        graph = fuse(merge(graph))
    found = [[PassCost(), PassCost()] for _ in range(config.num_layers)]
    attentions = {node.name: node for node in _nodes(graph, length) if node.is_attention}
    for node in _nodes(graph, _TOKENS):
        if node.layer is None:
            continue
        long = attentions.get(node.name, node)
        for each, cost in enumerate((long.cost, long.backward)):
            found[node.layer][each] += _pass_cost(config, node, cost, backward=each == 1)
    return tuple(LayerCost(forward, backward) for forward, backward in found)


def _pass_cost(config: ModelConfig, node: NodeCost, cost: Cost, *, backward: bool) -> PassCost:
    if node.is_attention:
        return PassCost(attention=cost.flops, attended=cost.bytes, kernels=1 + backward * _AROUND_ATTENTION)
    moved, weights = _traffic(cost, backward), cost.weights * (1 + backward)
    if node.is_mixture:
        # Beside products they activate and add up. A token is multiplied by as many elements as it reads of one alone.
        mixture = config.experts
        assert mixture is not None
        each = 3 * mixture.per_token * config.hidden_size * mixture.intermediate_size
        each *= 2 * (1 + backward)
        return PassCost(routed=each, inside=moved, moved=moved, weights=weights, kernels=4 + 4 * backward)
    if node.weight is None:
        is_hidden = node.shape == (_TOKENS, config.hidden_size)
        return PassCost(
            between=moved if is_hidden else 0, inside=0 if is_hidden else moved, kernels=1 if cost.bytes else 0
        )
    (out, width), flops = node.weight, cost.flops // _TOKENS
    found = PassCost(moved=moved, weights=weights, kernels=1 + backward)
    if _is_router(config, node):
        return replace(found, routed=flops)
    return replace(found, dense=flops, operands=out if backward else width)


def _traffic(cost: Cost, backward: bool) -> int:
    """Bytes of a token, without weights, of which a backward pass writes as many gradients."""
    return (cost.bytes - cost.weights * (1 + backward)) // _TOKENS


def _nodes(graph: Any, tokens: int) -> list[NodeCost]:
    """Of one sequence of so many tokens."""
    ids = meta_indices(tokens)
    batch = Batch(ids, ids, meta_indices(2), tokens, None)
    return node_costs(graph, batch, Workload((tokens,), (tokens,)), gradients=True)


def _is_router(config: ModelConfig, node: NodeCost) -> bool:
    """Whether it is the product that chooses among experts."""
    mixture = config.experts
    return mixture is not None and node.weight == (mixture.count, config.hidden_size)
