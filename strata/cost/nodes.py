"""What every node of a graph costs, from shapes alone: the graph runs on the meta device, nothing is computed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, fx

from strata.cost.attention_times import Attends
from strata.graph.trace import operation_of
from strata.graph.walk import placed_arguments, walk
from strata.hardware.roofline import Cost, Workload
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.op import ATEN, OPERATIONS, Operation
from strata.kernels.quant.quantized import QuantizedWeight, Scheme, multiplied_in
from strata.kernels.state.paged import PagedKV


class Read(NamedTuple):
    """source: the node that made a "result"; empty for others. precision: a dtype, or the kind of a packed weight's
    values. nbytes: of all weights in that precision; 0 for others."""

    kind: Literal["result", "weight", "cache"]
    source: str
    precision: str
    nbytes: int = 0


@dataclass(frozen=True)
class NodeCost:
    """One node that does work. `shape` is its result's; `parameters` maps the names it reads to their sizes.

    weight: [out, width] of the weight that a product multiplies by, merged ones together; None of what is no product.
    scheme: of packed weights that it multiplies by; None: they are plain. quantized_bytes: of such a weight, scales
    among them.
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
    quantized_bytes: float = 0.0
    backward: Cost = field(default_factory=Cost)
    attends: Attends | None = None
    reads: tuple[Read, ...] = ()

    @property
    def weight_kind(self) -> str:
        """The kind of values of packed weights ("e4m3"); empty: they are plain."""
        return "" if self.scheme is None else self.scheme.values

    @property
    def activation_kind(self) -> str:
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

    @property
    def is_attention(self) -> bool:
        """Whether it multiplies queries with all keys that they see."""
        operation = OPERATIONS.get(self.operation)
        return operation is not None and operation.attends


class Reads:
    """Follows the values of a graph, whose nodes are told in order, through views to the nodes that made them."""

    def __init__(self) -> None:
        self._makers: dict[fx.Node, tuple[str, ...]] = {}

    def look(self, node: fx.Node, args: tuple[Any, ...], *, works: bool) -> tuple[Read, ...]:
        """What a node reads, each once. args: its arguments' values. works: it does; others only view memory."""
        found: dict[Read, int] = {}
        for one, value in zip(node.args, args, strict=True):
            for read in self._of(one, value):
                key = read._replace(nbytes=0)
                found[key] = found.get(key, 0) + read.nbytes
        makers = (node.name,) if works else tuple(read.source for read in found if read.kind == "result")
        self._makers[node] = makers
        return tuple(read._replace(nbytes=nbytes) for read, nbytes in found.items())

    def _of(self, argument: Any, value: Any) -> Iterator[Read]:
        pages = value if isinstance(value, PagedKV) else getattr(value, "pages", None)
        if isinstance(value, QuantizedWeight):
            yield Read("weight", "", value.kind, value.nbytes)
        elif isinstance(argument, fx.Node):
            first = value[0] if isinstance(value, tuple) and value and isinstance(value[0], Tensor) else value
            precision = str(first.dtype).removeprefix("torch.") if isinstance(first, Tensor) else ""
            if argument.meta.get("parameters"):
                yield Read("weight", "", precision, value.nbytes)
            for maker in self._makers.get(argument, ()):
                yield Read("result", maker, precision)
            if isinstance(pages, PagedKV) and pages.keys:
                yield Read("cache", "", str(pages.keys[0].dtype).removeprefix("torch."))
        elif isinstance(argument, (tuple, list)):
            for one, inner in zip(argument, value, strict=True):
                yield from self._of(one, inner)


def node_costs(
    graph: fx.GraphModule,
    argument: Any,
    workload: Workload,
    limits: DeviceLimits | None = None,
    *,
    gradients: bool = False,
) -> list[NodeCost]:
    """The cost of each node of a traced graph (merged and bound or not) for one step, in order.

    argument: what the graph is called with, its tensors on the meta device (a Batch, or hidden states for a head); a
    plain tuple holds several. workload: the sequences of that step, which shapes alone cannot tell. limits: a device,
    which need not be here, whose kernels are told; for a graph that is bound for its kind. gradients: tell the cost of
    the backward pass, too (`Operation.backward_cost`).
    Nodes that only view memory are left out. Raises NotImplementedError, naming it, for a function whose cost is not
    known.
    """
    found, reads = [], Reads()
    sizes = {name: one.numel() for name, one in graph.named_parameters(remove_duplicate=False)}
    known: dict[Hashable, tuple[Any, ...]] = {}
    for node, operation, args, result, alike in walk(graph, argument, shares=True):
        read = reads.look(node, args, works=operation is not None)
        if operation is None:
            continue
        first = result[0] if isinstance(result, tuple) else result
        if alike not in known:
            ran = ("", ()) if limits is None else _run_by(node, args, limits)
            backward = operation.backward_cost(*args, workload=workload) if gradients else Cost()
            known[alike] = operation.cost(*args, workload=workload), *ran, backward
        cost, implementation, kernels, backward = known[alike]
        found.append(
            NodeCost(
                node.name,
                operation.name,
                node.meta["layer"],
                node.meta["module"],
                cost,
                tuple(first.shape),
                {name: sizes[name] for one in node.all_input_nodes for name in one.meta.get("parameters", ())},
                implementation,
                kernels,
                _weight_shape(node, operation, args),
                *_packed_as(args),
                backward,
                reads=tuple(one for one in read if one.kind != "cache" or _attends(operation)),
            )
        )
    return found


def _packed_as(args: tuple[Any, ...]) -> tuple[Scheme | None, float]:
    """See `NodeCost`: of packed weights among arguments."""
    weight = next((one for one in args if isinstance(one, QuantizedWeight)), None)
    return (None, 0.0) if weight is None else (weight.scheme, weight.nbytes / weight.numel())


def _run_by(node: fx.Node, args: tuple[Any, ...], limits: DeviceLimits) -> tuple[str, tuple[str, ...]]:
    """The name of the implementation that runs a node of a bound graph on a device, and the kernels it launches."""
    if operation_of(node) is None:
        return "torch", (ATEN,)
    placed, bound = placed_arguments(limits, args), node.meta["bound"]
    return bound.choose(*placed).name, bound.launches(*placed)


def total(nodes: Iterable[NodeCost]) -> Cost:
    """The cost of all nodes together."""
    return sum((node.cost for node in nodes), Cost())


def parameter_count(nodes: Iterable[NodeCost]) -> int:
    """Elements of all parameters that the nodes read; one that several read (a tied head) counts once."""
    sizes: dict[str, int] = {}
    for node in nodes:
        sizes |= node.parameters
    return sum(sizes.values())


def _attends(operation: Operation) -> bool:
    """Whether it reads keys and values of the tokens before."""
    return operation.reads_state and not operation.recurrent


def _weight_shape(node: fx.Node, operation: Operation, args: tuple[Any, ...]) -> tuple[int, int] | None:
    """Of the one weight among the arguments of a product; an operation that multiplies by several has none here."""
    weights = [
        (value.shape[0], value.shape[1])
        for argument, value in zip(node.args, args, strict=True)
        if _is_weight(argument) and value.dim() == 2
    ]
    return weights[0] if operation.dense and len(weights) == 1 else None


def _is_weight(argument: Any) -> bool:
    if isinstance(argument, QuantizedWeight):
        return True
    return isinstance(argument, fx.Node) and bool(argument.meta.get("parameters"))
