"""Ranks that would keep the same keys and values keep different tokens of them instead (decode context parallelism)."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from strata.comm.join_heads import join_heads
from strata.comm.operations import Along, all_gather
from strata.graph.capture import operation_of, reads_state
from strata.kernels.attention.attention import attention
from strata.kernels.attention.divided.kept import kept_attention
from strata.kernels.state.kept_keys import KeptKeys


def divide_keys(graph: fx.GraphModule, along: Along, kept: KeptKeys, dtype: torch.dtype) -> fx.GraphModule:
    """Let attention read what this rank keeps of the keys, and the other ranks along `along` the rest; in place.

    graph: of a rank, in `dtype`, captured and not rewritten by a pass yet; returns `graph`. It then takes pages that
    hold the tokens which `kept` says, and a slot mapping that is -1 for all others.

    In place of each attention: the queries of all ranks are gathered, each rank attends with all of them to its keys,
    and a message gives each its own heads back, joined. Raises ValueError for what else reads keys, and for attention
    with a window or with sinks.
    """
    for node in list(graph.graph.nodes):
        if operation_of(node) is attention:
            _divide(graph.graph, node, along, kept, dtype)
        elif reads_state(node) and operation_of(node) is not kept_attention:
            raise ValueError(f"{node.target.name} reads what sequences have kept, which ranks cannot divide by tokens")
    graph.recompile()
    return graph


def _divide(graph: fx.Graph, node: fx.Node, along: Along, kept: KeptKeys, dtype: torch.dtype) -> None:
    q, *others, spec = node.args[:5]
    if spec.window is not None or any(sinks is not None for sinks in node.args[5:]):  # type: ignore[union-attr]
        raise ValueError("attention with windows or sinks cannot be divided among ranks by tokens")

    def call(target: Any, *arguments: Any) -> fx.Node:
        made = graph.call_function(target, arguments)
        made.meta = {"module": node.meta["module"], "layer": node.meta["layer"]}
        return made

    with graph.inserting_before(node):
        queries = call(all_gather, q, along, 1)
        found = call(kept_attention, queries, *others, spec, kept)
        mixed, sums = (call(getitem, found, index) for index in range(2))
        own = call(join_heads, mixed, along, sums, dtype)
    node.replace_all_uses_with(own)
    graph.erase_node(node)
