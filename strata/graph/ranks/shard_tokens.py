"""Ranks that hold a model alike divide the tokens of a step: each runs its own, and keeps all keys and values."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from strata.comm.operations import Along
from strata.comm.token_messages import gather_keys_values, gather_tokens
from strata.graph.gather import ROWWISE
from strata.graph.rewrite import insert_after
from strata.graph.trace import operation_of, reads_state
from strata.kernels.attention.spec import HeadsSpec
from strata.kernels.state.groups import of_group
from strata.kernels.state.kv_write import kv_write
from strata.kernels.state.latent_write import latent_write
from strata.kernels.state.qk_rope_kv_write import qk_rope_kv_write

_WRITES = (kv_write, qk_rope_kv_write, latent_write)


def shard_tokens(graph: fx.GraphModule, along: Along) -> fx.GraphModule:
    """Let each rank along `along` run its own tokens of a step, in place, before the graph is bound; returns `graph`.

    graph: of `gather_after_attention`. It then takes the Batch of the rank's tokens, equally many on every rank, whose
    `pages.slot_mapping` [ranks * tokens] has those of all ranks one after another; rows [rows], of each wanted token
    the row where its rank has it, and any row elsewhere; and `chosen` [rows] int32, where the token is among the
    rows that all ranks take, one rank's after another. It returns the same on every rank.

    - Keys and values are gathered before they are written, so that each rank's pages have those of all tokens.
    - The wanted rows are gathered behind the last attention, and from there on all ranks compute the same.

    Raises ValueError if something before that mixes tokens in another way.
    """
    nodes = list(graph.graph.nodes)
    _, rows = (node for node in nodes if node.op == "placeholder")
    for node in nodes[: max(nodes.index(user) for user in rows.users)]:
        if node not in rows.users:
            _require_known(node)
    with graph.graph.inserting_after(rows):
        chosen = graph.graph.placeholder("chosen")
    for kept in list(rows.users):
        readers = list(kept.users)
        gathered = insert_after(kept, gather_tokens, kept, along)
        found = insert_after(gathered, torch.index_select, gathered, 0, chosen)
        for reader in readers:
            reader.replace_input_with(kept, found)
    for node in nodes:
        if operation_of(node) is qk_rope_kv_write:
            _write_behind(node, along)
        elif operation_of(node) is kv_write:
            _write_gathered(node, along)
        elif operation_of(node) is latent_write:
            _write_rows_behind(node, along)
    graph.recompile()
    return graph


def _require_known(node: fx.Node) -> None:
    operation = operation_of(node)
    if operation is None:
        known = node.op in ("placeholder", "get_attr") or node.target in ROWWISE or node.target in (getattr, of_group)
    else:
        known = operation.rowwise or reads_state(node) or operation in _WRITES
    if not known:
        raise ValueError(f"{node.target} mixes tokens or is not known not to, so ranks cannot divide them")


def _write_behind(node: fx.Node, along: Along) -> None:
    """What would write the keys and values of the rank's own tokens leaves it to a `kv_write` of all."""
    product, q_weight, k_weight, cos, sin, pages, heads = node.args
    assert isinstance(heads, HeadsSpec)
    node.args = (product, q_weight, k_weight, cos, sin, None, heads)
    k, v = (insert_after(node, getitem, node, index) for index in (1, 2))
    # The later of both, of which each was put directly behind the node.
    keys, values = _gathered(k, v, node, k, along)
    insert_after(values, kv_write, keys, values, pages, heads.layer, of=node)


def _write_rows_behind(node: fx.Node, along: Along) -> None:
    """The same for rows that are key and value at once: both pools are one, which a `kv_write` writes so."""
    *front, pages, layer, paired = node.args
    node.args = (*front, None, layer, paired)
    rows = insert_after(node, gather_tokens, node, along)
    heads = insert_after(rows, "unflatten", rows, -1, (1, -1))
    insert_after(heads, kv_write, heads, heads, pages, layer)


def _write_gathered(node: fx.Node, along: Along) -> None:
    k, v, pages, layer = node.args
    assert isinstance(k, fx.Node)
    assert isinstance(v, fx.Node)
    for reader in list(node.users):
        assert reader.target is getitem
        reader.replace_all_uses_with((k, v)[reader.args[1]])  # type: ignore[index]
        node.graph.erase_node(reader)
    node.args = (*_gathered(k, v, node, node.prev, along), pages, layer)


def _gathered(k: fx.Node, v: fx.Node, of: fx.Node, place: fx.Node, along: Along) -> tuple[fx.Node, fx.Node]:
    """Keys and values of all ranks, behind `place`, the values last."""
    both = insert_after(place, gather_keys_values, k, along, v, of=of)
    keys = insert_after(both, getitem, both, 0)
    return keys, insert_after(keys, getitem, both, 1)
