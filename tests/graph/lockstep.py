"""The graphs of all ranks run side by side in one process: at a collective, each gets what the others hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add, attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from strata.comm.collectives import Pending
from strata.comm.experts.sent_rows import Arrived
from strata.comm.reduced_norm import linear_all_reduce_add_rms_norm
from strata.graph.trace import operation_of
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import rms_norm

Combine = Callable[[str, Sequence[Tensor], tuple[Any, ...]], Any]


def combine(name: str, parts: Sequence[Tensor], others: tuple[Any, ...]) -> Any:
    """What a collective gives every rank."""
    if name == "all_reduce":
        return reduce(add, parts)
    if name == "start_all_reduce":
        return Pending(reduce(add, parts))
    if name == "all_reduce_add_rms_norm":
        _, residual, weight, eps = others
        total = reduce(add, parts) + residual
        return total, rms_norm.reference(total, weight, eps)
    if name == "pairwise_all_reduce":
        while len(parts) > 1:
            parts = [add(*parts[at : at + 2]) for at in range(0, len(parts), 2)]
        return parts[0]
    if name in ("gather_tokens", "gather_keys_values"):
        return torch.cat(list(parts))
    if name == "all_gather":
        return torch.cat(list(parts), others[1])
    if name == "dispatch_rows":
        return torch.cat(list(parts))
    raise AssertionError(f"no test twin of the collective {name}")


def sent_rows(called: Sequence[tuple[Any, ...]]) -> list[Arrived]:
    """What `send_rows` gives each rank, row by row."""
    ranks, slots = len(called), called[0][5]
    spans = [range(slots * rank // ranks, slots * (rank + 1) // ranks) for rank in range(ranks)]
    # Of each rank: for each of its tokens the slots that compute it.
    taken: list[list[list[int]]] = []
    for _, _, _, chosen, _, _, *more in called:
        placement, mapping = (*more, None, None)[:2]
        taken.append([])
        for token, experts in enumerate(chosen.tolist()):
            own = experts if placement is None else [int(placement[e, token % placement.shape[1]]) for e in experts]
            taken[-1].append([] if mapping is not None and mapping[token] < 0 else own)
    goes = [
        [(r, t) for r in range(ranks) for t, own in enumerate(tokens) if set(own) & {*spans[r]}] for tokens in taken
    ]
    found = []
    for rank, span in enumerate(spans):
        come = [(source, token) for source in range(ranks) for to, token in goes[source] if to == rank]
        numbers = [
            [slot - span.start if slot in span else -1 for slot in taken[source][token]] for source, token in come
        ]
        rows, weights = (
            torch.stack([called[source][at][token] for source, token in come]) if come else called[rank][at][:0]
            for at in (0, 2)
        )
        inverse = torch.full((len(taken[rank]), ranks), -1)
        for place, (to, token) in enumerate(goes[rank]):
            inverse[token, to] = place
        found.append(
            Arrived(
                rows,
                weights,
                torch.tensor(numbers, dtype=torch.int32).reshape(-1, called[rank][3].shape[1]),
                sum(number >= 0 for row in numbers for number in row),
                torch.tensor([token * ranks + to for to, token in goes[rank]], dtype=torch.int64),
                inverse,
                [sum(to == other for to, _ in goes[rank]) for other in range(ranks)],
                [sum(to == rank for to, _ in goes[other]) for other in range(ranks)],
            )
        )
    return found


def returned_rows(called: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """What `return_rows` gives each rank."""
    parts = [rows.split(received) for rows, _, _, received in called]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(called))]


def run_in_lockstep(
    graphs: Sequence[fx.GraphModule], arguments: Sequence[tuple[Any, ...]], combine: Combine = combine
) -> list[Any]:
    """What each rank's graph returns for its arguments. The graphs have the same nodes but for constants."""
    values: list[dict[fx.Node, Any]] = [{} for _ in graphs]
    given = [iter(one) for one in arguments]
    results: list[Any] = []
    for nodes in zip(*(graph.graph.nodes for graph in graphs), strict=True):
        operation = operation_of(nodes[0])
        assert len({(node.op, node.name) for node in nodes}) == 1
        if operation is not None and operation.collective:
            called = [fx.map_arg(node.args, known.__getitem__) for node, known in zip(nodes, values, strict=True)]
            if operation.name == "combine_rows":
                totals = reduce(add, [args[0] for args in called]).chunk(len(graphs))
                for node, known, own_rows in zip(nodes, values, totals, strict=True):
                    known[node] = own_rows
                continue
            if operation.name in ("send_rows", "return_rows"):
                twin = sent_rows if operation.name == "send_rows" else returned_rows
                for node, known, own_rows in zip(nodes, values, twin(called), strict=True):
                    known[node] = own_rows
                continue
            if operation.name == "join_heads":
                for index, (node, known) in enumerate(zip(nodes, values, strict=True)):
                    known[node] = own_heads(called, index)
                continue
            if operation.name in ("all_gather", "gather_tokens") and called[0][1].size < len(graphs):
                size, dim = called[0][1].size, called[0][2] if operation.name == "all_gather" else 0
                for index, (node, known) in enumerate(zip(nodes, values, strict=True)):
                    first = index // size * size  # of neighbours
                    known[node] = torch.cat([args[0] for args in called[first : first + size]], dim)
                continue
            if operation.name == "all_to_all":
                for index, known in enumerate(values):
                    known[nodes[index]] = torch.cat([args[0].chunk(len(graphs))[index] for args in called])
                continue
            name, parts, others = operation.name, [args[0] for args in called], called[0][1:]
            if operation is linear_all_reduce_add_rms_norm:
                name, parts = "all_reduce_add_rms_norm", [linear.reference(args[0], args[2]) for args in called]
                others = (others[0], *others[2:])
            shared = combine(name, parts, others)
            if operation.name == "gather_keys_values":
                shared = shared, combine(operation.name, [args[2] for args in called], ())
            for node, known in zip(nodes, values, strict=True):
                known[node] = _own(shared)
            continue
        for graph, node, known, own in zip(graphs, nodes, values, given, strict=True):
            if node.op == "output":
                results.append(fx.map_arg(node.args[0], known.__getitem__))
            else:
                known[node] = _run(graph, node, known, own)
    return results


def own_heads(called: Sequence[tuple[Any, ...]], index: int) -> Tensor:
    """What `join_heads` gives a rank, from the arguments of all: by what each has found in all, unnormalized."""
    size, dtype = called[index][1].size, called[index][3]
    first = index // size * size
    group = called[first : first + size]
    weights = [sums.double().exp()[..., None] for _, _, sums, _ in group]
    total = reduce(add, weights)
    mixed = reduce(add, [weight * part.double() for weight, (part, *_) in zip(weights, group, strict=True)]) / total
    return mixed.chunk(size, 1)[index - first].to(dtype)


def _own(shared: Any) -> Any:
    if isinstance(shared, Pending):
        return Pending(shared.result.clone())
    return pytree.tree_map(torch.clone, shared)


def _run(graph: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Any], given: Any) -> Any:
    if node.op == "placeholder":
        return next(given)
    if node.op == "get_attr":
        return attrgetter(str(node.target))(graph)
    args = fx.map_arg(node.args, known.__getitem__)
    target: Any = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
    return target(*args[1:]) if isinstance(node.target, str) else target(*args)
