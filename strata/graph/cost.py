"""What every node of a graph costs, from shapes alone: the graph runs on the meta device, nothing is computed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from strata.graph.capture import operation_of
from strata.graph.ranks.row_parts import row_part
from strata.graph.reads import Read, Reads
from strata.hardware.roofline import Cost, Workload
from strata.kernels.attention.times import Attends
from strata.kernels.device_limits import DeviceLimits, as_if_on
from strata.kernels.moe.experts import biased_experts, expected_experts, expert_bytes, local_experts
from strata.kernels.op import ATEN, OPERATIONS, Operation
from strata.kernels.quant.packed import PackedWeight, Scheme, multiplied_in
from strata.kernels.state.groups import of_group
from strata.kernels.state.kept_keys import ALL_KEYS, KeptKeys
from strata.kernels.state.paged import PagedKV
from strata.kernels.torch_functions import TORCH_FUNCTIONS

# They only change how the same memory is looked at.
_VIEWS = {getattr, operator.getitem, "split_with_sizes", "narrow", "unflatten", "flatten", row_part, of_group}


@dataclass(frozen=True)
class NodeCost:
    """One node that does work. `shape` is its result's; `parameters` maps the names it reads to their sizes.

    weight: [out, width] of the weight that a product multiplies by, merged ones together; None of what is no product.
    scheme: of packed weights that it multiplies by; None: they are plain. packed_bytes: of such a weight, scales among
    them.
    backward: of its gradients, if they were asked for.
    attends: what runs an attention over pages, where that is known.
    reads: what it reads, see `Read`; of cached keys and values only what attends.
    implementation, kernels: what runs it on the device that was asked about, and what that launches (see
        `Implementation`); empty if none was.
    """

    name: str
    operation: str
    layer: int | None
    module: str
    cost: Cost
    shape: tuple[int, ...]
    parameters: dict[str, int] = field(default_factory=dict)
    implementation: str = ""
    kernels: tuple[str, ...] = ()
    weight: tuple[int, int] | None = None
    scheme: Scheme | None = None
    packed_bytes: float = 0.0
    backward: Cost = field(default_factory=Cost)
    attends: Attends | None = None
    reads: tuple[Read, ...] = ()

    @property
    def packed(self) -> str:
        """The kind of values of packed weights ("e4m3"); empty: they are plain."""
        return "" if self.scheme is None else self.scheme.values

    @property
    def rounded(self) -> str:
        """The dtype of the device database in which it multiplies where the scheme of its packed weights rounds
        activations too; empty: the model's."""
        return "" if self.scheme is None else multiplied_in(self.scheme)

    @property
    def is_recurrent(self) -> bool:
        """Whether what it has cached are states, no keys and values."""
        operation = OPERATIONS.get(self.operation)
        return operation is not None and operation.recurrent

    @property
    def is_mixture(self) -> bool:
        """Whether it multiplies by the experts of a mixture."""
        operation = OPERATIONS.get(self.operation)
        return operation is not None and operation.mixture


def node_costs(
    graph: fx.GraphModule,
    argument: Any,
    workload: Workload,
    limits: DeviceLimits | None = None,
    *,
    gradients: bool = False,
) -> list[NodeCost]:
    """The cost of each node of a captured graph (merged and bound or not) for one step, in order.

    argument: what the graph is called with, its tensors on the meta device (a Batch, or hidden states for a head); a
    plain tuple holds several. workload: the sequences of that step, which shapes alone cannot tell. limits: a device,
    which need not be here, whose kernels are told; for a graph that is bound for its kind. gradients: tell the cost of
    the backward pass, too (`Operation.backward_cost`).
    Nodes that only view memory are left out. Raises NotImplementedError, naming it, for a function whose cost is not
    known.
    """
    found, reads = [], Reads()
    for called in walk(graph, argument):
        node, operation, args, result = called
        read = reads.look(node, args, works=operation is not None)
        if operation is None:
            continue
        first = result[0] if isinstance(result, tuple) else result
        implementation, kernels = ("", ()) if limits is None else _run_by(node, args, limits)
        found.append(
            NodeCost(
                node.name,
                operation.name,
                node.meta["layer"],
                node.meta["module"],
                operation.cost(*args, workload=workload),
                tuple(first.shape),
                _parameter_sizes(graph, node),
                implementation,
                kernels,
                _weight_shape(node, operation, args),
                *_packed_as(args),
                operation.backward_cost(*args, workload=workload) if gradients else Cost(),
                reads=tuple(one for one in read if one.kind != "cache" or _attends(operation)),
            )
        )
    return found


def _packed_as(args: tuple[Any, ...]) -> tuple[Scheme | None, float]:
    """See `NodeCost`: of packed weights among arguments."""
    weight = next((one for one in args if isinstance(one, PackedWeight)), None)
    return (None, 0.0) if weight is None else (weight.scheme, weight.nbytes / weight.numel())


def _run_by(node: fx.Node, args: tuple[Any, ...], limits: DeviceLimits) -> tuple[str, tuple[str, ...]]:
    """The name of the implementation that runs a node of a bound graph on a device, and the kernels it launches."""
    if operation_of(node) is None:
        return "torch", (ATEN,)
    placed, bound = placed_arguments(limits, args), node.meta["bound"]
    return bound.choose(*placed).name, bound.launches(*placed)


def placed_arguments(limits: DeviceLimits, args: tuple[Any, ...]) -> list[Any]:
    """Arguments on the meta device as if they were on another, for an implementation to be chosen by."""
    return [_as_if_on(limits, argument) for argument in args]


def _as_if_on(limits: DeviceLimits, argument: Any) -> Any:
    if isinstance(argument, PackedWeight):
        return argument.with_tensors({name: as_if_on(limits, tensor) for name, tensor in argument.tensors.items()})
    return as_if_on(limits, argument) if isinstance(argument, Tensor) else argument


def operation_counts(graph: fx.GraphModule) -> Counter[str]:
    """How many nodes of each operation a graph has; those of torch by their name, views are not counted."""
    return Counter(work.name for node in graph.graph.nodes if (work := work_of(node)) is not None)


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

    Outside attention the cost follows from the numbers of tokens and of rows whose logits are wanted; attention and
    recurrences are asked for their own. Activations can stay on the chip in principle, so the bytes of a step are the
    weights, and the keys, values and states that it reads, once each. Of the experts of a mixture it reads those that
    its tokens are expected to go to.

    token_flops, row_flops: of a token, and of a row behind the last attention. token_weights: bytes of the embedding's
    row. token_traffic: bytes of a token's activations that operations outside attention read and write, which `step`
    leaves out. weights: bytes of the parameters that every step reads. attentions: each distinct attention as a
    function of the workload, and in how many layers it stands; recurrences: and each operation of fixed states,
    convolutions too. mixtures: the bytes of experts that so many tokens read,
    whether only rows go to them, and in how many layers. messages: the collectives of a step. token_sent, row_sent:
    bytes that a rank sends in them for a token, and for a row behind the last attention.
    """

    token_flops: int
    row_flops: int
    token_weights: int
    token_traffic: int
    weights: int
    attentions: tuple[tuple[Callable[[Workload], Cost], int], ...]
    mixtures: tuple[tuple[Callable[[int], int], bool, int], ...]
    messages: int = 0
    token_sent: int = 0
    row_sent: int = 0
    recurrences: tuple[tuple[Callable[[Workload], Cost], int], ...] = ()

    @property
    def states(self) -> tuple[tuple[Callable[[Workload], Cost], int], ...]:
        """Of all operations that read what sequences keep."""
        return self.attentions + self.recurrences

    def step(self, workload: Workload, rows: int) -> Cost:
        """A step that runs `workload` and projects `rows` hidden states onto the vocabulary."""
        tokens = workload.tokens
        flops, cached = self.token_flops * tokens + self.row_flops * rows, 0
        for state_cost, layers in self.states:
            cost = state_cost(workload)
            flops += layers * cost.flops
            cached += layers * cost.cached
        weights = self.weights + self.token_weights * tokens
        weights += sum(layers * read(rows if of_rows else tokens) for read, of_rows, layers in self.mixtures)
        sent = self.token_sent * tokens + self.row_sent * rows
        return Cost(flops=flops, weights=weights, cached=cached, messages=self.messages, sent=sent).least


# The second tells one window of attention from another.
_SHORT, _LONG = Workload((1,), (1,)), Workload((1,), (1 << 40,))


def step_costs(graph: fx.GraphModule, argument: Callable[[int, int], Any]) -> StepCosts:
    """What steps of a model cost, from the graph that returns the logits of some rows (`gather_after_attention`).

    argument: what the graph is called with for so many sequences of one token each, of which so many rows are wanted.
    """
    flops: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    traffic = messages = 0
    attentions: Counter[Cost] = Counter()
    recurrences: Counter[Cost] = Counter()
    examples: dict[Cost, Callable[[Workload], Cost]] = {}
    mixtures: Counter[tuple[int, int, int, int, int, bool]] = Counter()
    for one, two in zip(walk(graph, argument(1, 1)), walk(graph, argument(2, 1)), strict=True):
        if one.operation is None:
            continue
        of_one, of_two = (partial(_cost, one.operation, called.args) for called in (one, two))
        if one.operation.reads_state:
            kind, is_recurrent = of_one(_LONG), one.operation.recurrent
            (recurrences if is_recurrent else attentions)[kind] += 1
            weights["step"] += kind.weights  # of a convolution, a state space, sinks, and of what makes keys of latents
            more = of_two(_SHORT) - of_one(_SHORT)
            examples.setdefault(kind, partial(_recurrent_cost, of_one, more) if is_recurrent else of_one)
            continue
        # With twice the tokens and as many rows: what has grown goes by tokens.
        cost, grown = of_one(_SHORT), of_two(_SHORT)
        flops.update(token=grown.flops - cost.flops, row=2 * cost.flops - grown.flops)
        moved, moved_of_two = (each.bytes - each.weights for each in (cost, grown))
        traffic += moved_of_two - moved
        messages += cost.messages
        sent.update(token=grown.sent - cost.sent, row=2 * cost.sent - grown.sent)
        if one.operation.mixture:
            (_, _, chosen, gate_up, down, *others), rows = one.args, len(two.args[2])
            count = others[1] if one.operation is local_experts else len(down)
            sources = len(chosen)  # ranks that bring tokens, of which each has one here
            biases = others[:2] if one.operation is biased_experts else ()
            size = expert_bytes(gate_up, down, *biases)
            mixtures[chosen.shape[1], count, len(down), size, sources, rows == sources] += 1
        else:
            weights.update(token=grown.weights - cost.weights, step=2 * cost.weights - grown.weights)
    return StepCosts(
        flops["token"],
        flops["row"],
        weights["token"],
        traffic,
        weights["step"],
        tuple((examples[kind], layers) for kind, layers in attentions.items()),
        tuple((partial(_expert_bytes, *kind), of_rows, layers) for (*kind, of_rows), layers in mixtures.items()),
        messages,
        sent["token"],
        sent["row"],
        tuple((examples[kind], layers) for kind, layers in recurrences.items()),
    )


def meta_pages(
    workload: Workload,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 16,
    rounded: torch.dtype | None = None,
    kept: KeptKeys = ALL_KEYS,
) -> PagedKV:
    """KV pages on the meta device that hold the sequences of a workload. rounded, kept: as `PoolShape` has them."""
    most = max(-(-length // (page_size * kept.ranks)) for length in workload.total)
    pages = most * len(workload.total)
    pool = torch.empty(pages, page_size, kv_heads, head_dim, dtype=rounded or dtype, device="meta")
    exponent = torch.empty(pages, kv_heads, page_size, dtype=torch.uint8, device="meta")
    exponents = (exponent,) * (layers if rounded else 0)
    return PagedKV(
        (pool,) * layers,
        (pool,) * layers,
        meta_indices(len(workload.total), most),
        meta_indices(len(workload.total)),
        meta_indices(workload.tokens),
        key_exponents=exponents,
        value_exponents=exponents,
    )


def meta_indices(*shape: int) -> Tensor:
    """An index tensor of a batch on the meta device."""
    return torch.empty(shape, dtype=torch.int32, device="meta")


class Called(NamedTuple):
    """A node that calls something, what it computes (see `work_of`), and what it was called with and returned."""

    node: fx.Node
    operation: Operation | None
    args: tuple[Any, ...]
    result: Any


def walk(graph: fx.GraphModule, argument: Any) -> Iterator[Called]:
    """Run the graph on shapes; see `node_costs`."""
    values: dict[fx.Node, Any] = {}
    given = iter(argument if type(argument) is tuple else (argument,))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            value = attrgetter(str(node.target))(graph)
            values[node] = value.to("meta") if isinstance(value, Tensor) else value
        elif node.op != "output":
            args = fx.map_arg(node.args, values.__getitem__)
            target, operation = node.target, work_of(node)
            if operation is not None:
                values[node] = operation.meta(*args)
            elif target in _VIEWS:
                view = getattr(Tensor, target) if isinstance(target, str) else target
                values[node] = view(*args)
            else:
                name = target if isinstance(target, str) else getattr(target, "__name__", repr(target))
                raise NotImplementedError(
                    f"the cost of {name!r} (in {node.meta['module'] or 'the model'}) is not known"
                )
            yield Called(node, operation, args, values[node])


def work_of(node: fx.Node) -> Operation | None:
    """What a node computes; None if it only fetches or views memory."""
    return operation_of(node) or TORCH_FUNCTIONS.get(node.target)


def _attends(operation: Operation) -> bool:
    """Whether it reads keys and values of the tokens before."""
    return operation.reads_state and not operation.recurrent


def _cost(operation: Operation, args: tuple[Any, ...], workload: Workload) -> Cost:
    return operation.cost(*args, workload=workload)


def _recurrent_cost(of_one: Callable[[Workload], Cost], token: Cost, workload: Workload) -> Cost:
    """of_one: with the activations of one token. token: of each more, whose state is that of its sequence."""
    found, more = of_one(workload), workload.tokens - 1
    return replace(
        found,
        flops=found.flops + more * token.flops,
        read=found.read + more * token.read,
        written=found.written + more * token.written,
    )


def _expert_bytes(per_token: int, count: int, held: int, size: int, sources: int, tokens: int) -> int:
    """Bytes of those of `held` experts out of `count`, `size` each, that some of the tokens of `sources` ranks, each of
    which has so many, are expected to go to."""
    tokens *= sources
    return round(expected_experts(tokens, per_token * tokens, count) * held / count * size)


def _weight_shape(node: fx.Node, operation: Operation, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Of the one weight among the arguments of a product; an operation that multiplies by several has none here."""
    weights = [
        (value.shape[0], value.shape[1])
        for argument, value in zip(node.args, args, strict=True)
        if _is_weight(argument) and value.dim() == 2
    ]
    return weights[0] if operation.dense and len(weights) == 1 else None


def _is_weight(argument: Any) -> bool:
    if isinstance(argument, PackedWeight):
        return True
    return isinstance(argument, fx.Node) and bool(argument.meta.get("parameters"))


def _parameter_sizes(graph: fx.GraphModule, node: fx.Node) -> dict[str, int]:
    names = [name for argument in node.all_input_nodes for name in argument.meta.get("parameters", ())]
    return {name: graph.get_parameter(name).numel() for name in names}
