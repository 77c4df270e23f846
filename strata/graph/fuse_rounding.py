"""In graphs of many rows, norms and gates round what they make to 8 bits for the products behind them."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from strata.graph.rewrite import finished, insert_before, joined, replace, value_of
from strata.kernels.activation.quantized_silu_mul import silu_mul_round
from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.linear.linear import linear
from strata.kernels.linear.quantized_linear import quantized_linear
from strata.kernels.norm.norm import (
    add_rms_norm,
    add_rms_norm_round,
    rms_norm,
    rms_norm_round,
    wide_rms_norm,
    wide_rms_norm_round,
)
from strata.kernels.op import Operation
from strata.kernels.quant.quantized import QuantizedWeight

# Kind, columns, and the scale that was found ahead: see `round_rows`.
_Rounding = tuple[str, int, float | None]


class _Fusion(NamedTuple):
    """rounded: what takes the place of an operation. results: how many it has before the values and scales. row: which
    of the operation's results is rounded; None: its only one. keeps: the rows may be kept as they are, too."""

    rounded: Operation
    results: int
    row: int | None
    keeps: bool


_FUSIONS = {
    rms_norm: _Fusion(rms_norm_round, 0, None, True),
    add_rms_norm: _Fusion(add_rms_norm_round, 1, 1, True),
    wide_rms_norm: _Fusion(wide_rms_norm_round, 0, None, True),
    silu_mul: _Fusion(silu_mul_round, 0, None, False),
}


def fuse_rounding(
    graph: fx.GraphModule, dtype: torch.dtype, multiplies: Callable[[QuantizedWeight], bool]
) -> fx.GraphModule:
    """Let norms and `silu_mul` round the rows that `linear` would round, in place, in a graph that `fuse` has gone over
    and that is not bound; returns `graph`.

    - `rms_norm`, `wide_rms_norm` or `add_rms_norm` becomes `rms_norm_round`, `wide_rms_norm_round` or
      `add_rms_norm_round`; those that read its rows otherwise read them as they are.
    - `silu_mul` that products alone read becomes `silu_mul_round`.
    - The products become `quantized_linear`.

    dtype: of the activations. multiplies: whether products round many rows for this weight. Results have the same bits.
    Left alone is what `gather_after_attention` computes for few rows.
    """
    few = _behind_rows(graph)
    for node in list(graph.graph.nodes):
        fusion = _FUSIONS.get(node.target) if node.op == "call_function" else None
        if fusion is None or node in few:
            continue
        rounding, readers = _readers(graph, node, fusion, multiplies)
        if rounding is not None and (fusion.keeps or len(readers) == len(node.users)):
            _fuse(node, fusion, rounding, readers, dtype)
    return finished(graph)


def _behind_rows(graph: fx.GraphModule) -> set[fx.Node]:
    """What is computed for chosen rows alone."""
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found = set(arguments[1:])
    for node in graph.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _rows_of(node: fx.Node, fusion: _Fusion) -> list[fx.Node]:
    if fusion.row is None:
        return [node]
    return [user for user in node.users if user.target is getitem and user.args[1] == fusion.row]


def _readers(
    graph: fx.GraphModule, node: fx.Node, fusion: _Fusion, multiplies: Callable[[QuantizedWeight], bool]
) -> tuple[_Rounding | None, list[fx.Node]]:
    """How products round the rows of a node, and all that do it as the first of them."""
    found: list[fx.Node] = []
    first = None
    for rows in _rows_of(node, fusion):
        for user in rows.users:
            weight = user.args[1] if user.target is linear else None
            if not isinstance(weight, QuantizedWeight) or user.args[0] is not rows:
                continue
            columns = weight.columns if weight.activations == "block" else 0
            rounding = weight.kind, columns, weight.input_scale
            if rounding == (first or rounding) and multiplies(_held(graph, weight)):
                first = rounding
                found.append(user)
    return first, found


def _held(graph: fx.GraphModule, weight: QuantizedWeight) -> QuantizedWeight:
    """The weight that the nodes of one fetch."""
    fetched = {name: one for name, one in weight._asdict().items() if isinstance(one, fx.Node)}
    return weight.with_tensors({name: value_of(graph, one) for name, one in fetched.items()})


def _fuse(node: fx.Node, fusion: _Fusion, rounding: _Rounding, readers: list[fx.Node], dtype: torch.dtype) -> None:
    rows = _rows_of(node, fusion)
    keeps = any(user not in readers for one in rows for user in one.users)
    kind, columns, static = rounding
    arguments: tuple[Any, ...] = (*node.args, kind, columns, *((keeps,) if fusion.keeps else ()))
    if static is not None:
        arguments += (static,)
    name = joined(node, "round") if node.target is not silu_mul else f"{node.meta['module']}.silu_mul+round"
    fused = insert_before(node, fusion.rounded, *arguments, module=name)
    count = fusion.results + 2
    *others, values, scales = (insert_before(node, getitem, fused, place, of=fused) for place in range(count))
    kept = insert_before(node, getitem, fused, count, of=fused) if keeps else None
    for reader in readers:
        _, weight, bias = (*reader.args, None)[:3]
        replace(reader, insert_before(reader, quantized_linear, values, scales, weight, bias, dtype))
    # What still reads the node reads what the fused one returns.
    for item in [node] if fusion.row is None else list(node.users):
        read = kept if fusion.row in (None, item.args[1]) else others[0]
        if read is not None:
            item.replace_all_uses_with(read)
        item.graph.erase_node(item)
    if fusion.row is not None:
        node.graph.erase_node(node)
