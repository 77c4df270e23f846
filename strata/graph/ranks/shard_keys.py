"""Ranks that would keep the same keys and values keep different tokens of them instead (decode context parallelism)."""

from __future__ import annotations

from functools import partial
from operator import getitem
from typing import NamedTuple

import torch
from torch import fx

from strata.comm.join_heads import join_heads
from strata.comm.operations import Along, all_gather
from strata.comm.token_messages import gather_tokens
from strata.graph.rewrite import insert_before, replace
from strata.graph.trace import operation_of, reads_state
from strata.kernels.attention.attention import attention
from strata.kernels.attention.dcp.dcp import dcp_attention
from strata.kernels.attention.dcp.gathered import dcp_rows, gathered_attention
from strata.kernels.latent.attention import latent_attention
from strata.kernels.latent.dcp import (
    absorb_queries,
    dcp_latent_attention,
    expand_values,
    gathered_latent_attention,
)
from strata.kernels.state.dcp_shard import DcpShard


class KeySharding(NamedTuple):
    """along: the ranks. kept: what this one keeps. dtype: of the model. value: of latent attention, the elements of a
    head's value; 0: attention is not latent."""

    along: Along
    kept: DcpShard
    dtype: torch.dtype
    value: int = 0


def shard_keys(graph: fx.GraphModule, by: KeySharding) -> fx.GraphModule:
    """Let attention read what this rank keeps of the keys, and the other ranks the rest; in place; returns `graph`.

    graph: of a rank, captured and not rewritten by a pass yet. It then takes pages that hold the tokens which `kept`
    says, and a slot mapping that is negative for all others.

    In place of each attention: the queries of all ranks are gathered, each rank attends with all of them to its keys,
    and a message gives each its own heads back, joined. Of latent attention queries travel, and return, in the space of
    the latent. Raises ValueError for what else reads keys, and for attention with a window or with sinks.
    """
    for node in list(graph.graph.nodes):
        if operation_of(node) is attention:
            _divide(graph, node, by)
        elif operation_of(node) is latent_attention:
            _divide_latent(graph, node, by)
        elif reads_state(node) and operation_of(node) not in (dcp_attention, dcp_latent_attention):
            raise ValueError(f"{node.target.name} reads what sequences have kept, which ranks cannot divide by tokens")
    graph.recompile()
    return graph


def _divide(graph: fx.GraphModule, node: fx.Node, by: KeySharding) -> None:
    q, *others, spec = node.args[:5]
    if spec.window is not None or any(sinks is not None for sinks in node.args[5:]):  # type: ignore[union-attr]
        raise ValueError("attention with windows or sinks cannot be divided among ranks by tokens")
    queries = insert_before(node, all_gather, q, by.along, 1)
    found = insert_before(node, dcp_attention, queries, *others, spec, by.kept)
    replace(node, _joined(node, found, by))


def _divide_latent(graph: fx.GraphModule, node: fx.Node, by: KeySharding) -> None:
    q, row, weight, batch, spec = node.args
    assert isinstance(weight, fx.Node)
    rank = graph.get_parameter(str(weight.target)).shape[1]
    call = partial(insert_before, node)
    queries = call(all_gather, call(absorb_queries, q, weight, by.value), by.along, 1)
    found = call(dcp_latent_attention, queries, row, batch, spec, by.kept, rank)
    replace(node, call(expand_values, _joined(node, found, by), weight, by.value))


def gather_keys(graph: fx.GraphModule, by: KeySharding) -> fx.GraphModule:
    """As `shard_keys`, but each rank gathers the keys of all for a step's sequences and attends to them with its own
    queries: for prompts whose queries are more bytes."""
    for node in list(graph.graph.nodes):
        operation = operation_of(node)
        if operation not in (attention, latent_attention):
            continue
        is_latent = operation is latent_attention
        q, k, v, batch, spec, *sinks = node.args
        if any(sink is not None for sink in sinks):
            raise ValueError("attention with sinks cannot be divided among ranks by tokens")
        rows = insert_before(node, dcp_rows, k, batch, spec, by.kept, 1 if is_latent else 2)
        gathered = insert_before(node, gather_tokens, rows, by.along)
        attend = gathered_latent_attention if is_latent else gathered_attention
        replace(node, insert_before(node, attend, q, k, v, batch, spec, gathered, by.kept))
    graph.recompile()
    return graph


def _joined(node: fx.Node, found: fx.Node, by: KeySharding) -> fx.Node:
    """This rank's heads of what all ranks have found in their keys."""
    values, weights = (insert_before(node, getitem, found, index) for index in range(2))
    return insert_before(node, join_heads, values, by.along, weights, by.dtype)
