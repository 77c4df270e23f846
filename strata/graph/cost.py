"""What every node of a graph costs, from shapes alone: the graph runs on the meta device, nothing is computed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from strata.graph.capture import operation_of
from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.spec import AttentionSpec, HeadsSpec
from strata.kernels.moe.experts import expected_experts, experts
from strata.kernels.op import Operation
from strata.kernels.state.paged import PagedKV

# They only change how the same memory is looked at.
_VIEWS = {getattr, operator.getitem, "split_with_sizes", "narrow", "unflatten", "flatten"}


@dataclass(frozen=True)
class NodeCost:
    """One node that does work. `shape` is its result's; `parameters` maps the names it reads to their sizes."""

    name: str
    operation: str
    layer: int | None
    module: str
    cost: Cost
    shape: tuple[int, ...]
    parameters: dict[str, int] = field(default_factory=dict)


def node_costs(graph: fx.GraphModule, argument: Any, workload: Workload) -> list[NodeCost]:
    """The cost of each node of a captured graph (merged and bound or not) for one step, in order.

    argument: what the graph is called with, its tensors on the meta device (a Batch, or hidden states for a head).
    workload: the sequences of that step, which shapes alone cannot tell. Nodes that only view memory are left out.
    Raises NotImplementedError, naming it, for a function whose cost is not known.
    """
    found = []
    for node, operation, args, result in _walk(graph, argument):
        name = _work(node)
        if name is None:
            continue
        cost = operation.cost(*args, workload=workload) if operation is not None else _elementwise(args, result)
        first = result[0] if isinstance(result, tuple) else result
        found.append(
            NodeCost(
                node.name,
                name,
                node.meta["layer"],
                node.meta["module"],
                cost,
                tuple(first.shape),
                _parameter_sizes(graph, node),
            )
        )
    return found


def operation_counts(graph: fx.GraphModule) -> Counter[str]:
    """How many nodes of each operation a graph has; residual additions are "add", views are not counted."""
    return Counter(name for node in graph.graph.nodes if (name := _work(node)) is not None)


def total(nodes: Iterable[NodeCost]) -> Cost:
    """The cost of all nodes together."""
    return sum((node.cost for node in nodes), Cost())


def parameter_count(nodes: Iterable[NodeCost]) -> int:
    """Elements of all parameters that the nodes read; one that several read (a tied head) counts once."""
    sizes: dict[str, int] = {}
    for node in nodes:
        sizes |= node.parameters
    return sum(sizes.values())


@dataclass(frozen=True)
class StepCosts:
    """The least that any step of a model costs, from one look at its graph.

    Outside attention the cost follows from the number of tokens; attention is asked for its own. Activations can stay
    on the chip in principle, so the bytes of a step are the weights and the keys and values that it reads, once each.
    Of the experts of a mixture it reads those that its tokens are expected to go to.

    token_flops: of a token outside attention. row_flops: of a row of the head. weights: bytes of the parameters that
    every step reads. attentions: each distinct attention as a function of the workload, and in how many layers it
    stands. mixtures: the bytes of experts that so many tokens read, likewise.
    """

    token_flops: int
    row_flops: int
    weights: int
    attentions: tuple[tuple[Callable[[Workload], Cost], int], ...]
    mixtures: tuple[tuple[Callable[[int], int], int], ...]

    def step(self, workload: Workload, rows: int) -> Cost:
        """A step that runs `workload` and projects `rows` hidden states onto the vocabulary."""
        flops = self.token_flops * workload.tokens + self.row_flops * rows
        keys_and_values = 0
        for attention_cost, layers in self.attentions:
            cost = attention_cost(workload)
            flops += layers * cost.flops
            # Attention reads as many bytes of queries as it writes; the rest of what it reads are keys and values.
            keys_and_values += layers * (cost.read - cost.written)
        weights = self.weights + sum(layers * read(workload.tokens) for read, layers in self.mixtures)
        return Cost(flops=flops, read=weights + keys_and_values, weights=weights)


def step_costs(graph: fx.GraphModule, head: fx.GraphModule, argument: Any) -> StepCosts:
    """What steps of a model cost, from its captured graphs; `argument`: a meta batch of one token with pages."""
    workload = Workload((1,), (1,))
    hidden: Any = None
    flops = weights = 0
    kinds: Counter[tuple[object, ...]] = Counter()
    examples: dict[tuple[object, ...], Callable[[Workload], Cost]] = {}
    mixtures: Counter[tuple[int, int, int]] = Counter()
    for node, operation, args, result in _walk(graph, argument):
        hidden = result
        if operation is not None and operation.reads_state:
            kind = tuple(map(_kind, args))
            kinds[kind] += 1
            examples.setdefault(kind, partial(_cost_of, operation, args))
        elif operation is not None:
            cost = operation.cost(*args, workload=workload)
            flops += cost.flops
            if operation is experts:
                _, _, chosen, gate_up, down, *_ = args
                mixtures[chosen.shape[1], len(down), gate_up[0].nbytes + down[0].nbytes] += 1
            else:
                weights += cost.weights
        elif node.target is operator.add:
            flops += _elementwise(args, result).flops
    row = total(node_costs(head, hidden, workload))
    attentions = tuple((examples[kind], layers) for kind, layers in kinds.items())
    of_experts = tuple((partial(_expert_bytes, *kind), layers) for kind, layers in mixtures.items())
    return StepCosts(flops, row.flops, weights + row.weights, attentions, of_experts)


def meta_pages(
    workload: Workload, *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int = 16
) -> PagedKV:
    """KV pages on the meta device that hold the sequences of a workload."""
    most = max(-(-length // page_size) for length in workload.total)
    pool = torch.empty(most * len(workload.total), page_size, kv_heads, head_dim, dtype=dtype, device="meta")
    return PagedKV(
        (pool,) * layers,
        (pool,) * layers,
        meta_indices(len(workload.total), most),
        meta_indices(len(workload.total)),
        meta_indices(workload.tokens),
    )


def meta_indices(*shape: int) -> Tensor:
    """An index tensor of a batch on the meta device."""
    return torch.empty(shape, dtype=torch.int32, device="meta")


def _walk(graph: fx.GraphModule, argument: Any) -> Iterator[tuple[fx.Node, Operation | None, tuple[Any, ...], Any]]:
    """Run the graph on shapes: each node that calls something, its operation if it is one, arguments and result."""
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = argument
        elif node.op == "get_attr":
            value = attrgetter(str(node.target))(graph)
            values[node] = value.to("meta") if isinstance(value, Tensor) else value
        elif node.op != "output":
            args = fx.map_arg(node.args, values.__getitem__)
            target, operation = node.target, operation_of(node)
            if operation is not None:
                values[node] = operation.meta(*args)
            elif target is operator.add:
                values[node] = _sum(*args)
            elif target in _VIEWS:
                view = getattr(Tensor, target) if isinstance(target, str) else target
                values[node] = view(*args)
            else:
                name = target if isinstance(target, str) else getattr(target, "__name__", repr(target))
                raise NotImplementedError(
                    f"the cost of {name!r} (in {node.meta['module'] or 'the model'}) is not known"
                )
            yield node, operation, args, values[node]


def _work(node: fx.Node) -> str | None:
    """The name of what a node computes; None if it only fetches or views memory."""
    operation = operation_of(node)
    if operation is not None:
        return operation.name
    return "add" if node.target is operator.add else None


def _kind(argument: Any) -> object:
    """What of an argument its cost can depend on. One batch goes through all layers, whose pools are alike."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.dtype
    return argument._replace(layer=0) if isinstance(argument, (AttentionSpec, HeadsSpec)) else id(argument)


def _cost_of(operation: Operation, args: tuple[Any, ...], workload: Workload) -> Cost:
    return operation.cost(*args, workload=workload)


def _expert_bytes(per_token: int, count: int, size: int, tokens: int) -> int:
    """Bytes of the experts, `size` each, that some of the tokens are expected to go to."""
    return round(expected_experts(tokens, per_token * tokens, count) * size)


def _sum(left: Tensor, right: Tensor) -> Tensor:
    """The shape of left + right; adding on the meta device itself would import a second's worth of torch."""
    shape = torch.broadcast_shapes(left.shape, right.shape)
    return torch.empty(shape, dtype=torch.promote_types(left.dtype, right.dtype), device="meta")


def _elementwise(args: tuple[Any, ...], result: Tensor) -> Cost:
    read = sum(argument.nbytes for argument in args if isinstance(argument, Tensor))
    return Cost(flops=result.numel(), read=read, written=result.nbytes)


def _parameter_sizes(graph: fx.GraphModule, node: fx.Node) -> dict[str, int]:
    names = [name for argument in node.all_input_nodes for name in argument.meta.get("parameters", ())]
    return {name: graph.get_parameter(name).numel() for name in names}
