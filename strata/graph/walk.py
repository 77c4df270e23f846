"""A graph is walked: it runs on the meta device, on shapes alone, nothing is computed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from strata.graph.ranks.row_split import row_half
from strata.graph.trace import operation_of
from strata.hardware.roofline import Workload
from strata.kernels.device_limits import DeviceLimits, as_if_on
from strata.kernels.op import Operation
from strata.kernels.quant.quantized import QuantizedWeight
from strata.kernels.state.dcp_shard import ALL_KEYS, DcpShard
from strata.kernels.state.groups import of_group
from strata.kernels.state.paged import PagedKV
from strata.kernels.torch_functions import TORCH_FUNCTIONS

# Values that are what they say.
_PLAIN = (int, float, str, torch.dtype, type(None))
# They only change how the same memory is looked at.
_VIEWS = {getattr, operator.getitem, "split_with_sizes", "narrow", "unflatten", "flatten", row_half, of_group}


class Called(NamedTuple):
    """A node that calls something, what it computes (see `work_of`), and what it was called with and returned.

    alike: the same of nodes that do the same work with values of the same shapes; None of a view.
    """

    node: fx.Node
    operation: Operation | None
    args: tuple[Any, ...]
    result: Any
    alike: Hashable = None


def walk(graph: fx.GraphModule, argument: Any, *, shares: bool = False) -> Iterator[Called]:
    """Run a traced graph (merged and bound or not) on shapes.

    argument: what it is called with, its tensors on the meta device; a plain tuple holds several. shares: nodes
    that are alike, as those of most layers are, return the same value, so that it is made once. Raises
    NotImplementedError, naming it, for a function whose cost is not known.
    """
    values: dict[fx.Node, Any] = {}
    made: dict[Hashable, Any] = {}
    given = iter(argument if type(argument) is tuple else (argument,))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            value = attrgetter(str(node.target))(graph)
            values[node] = value.to("meta") if isinstance(value, Tensor) else value
        elif node.op != "output":
            args = fx.map_arg(node.args, values.__getitem__)
            target, operation, alike = node.target, work_of(node), None
            if operation is not None:
                if shares:
                    alike = id(operation), *map(_shape_of, args)
                    if alike not in made:
                        made[alike] = operation.meta(*args)
                values[node] = made[alike] if shares else operation.meta(*args)
            elif target in _VIEWS:
                view = getattr(Tensor, target) if isinstance(target, str) else target
                values[node] = view(*args)
            else:
                name = target if isinstance(target, str) else getattr(target, "__name__", repr(target))
                raise NotImplementedError(
                    f"the cost of {name!r} (in {node.meta['module'] or 'the model'}) is not known"
                )
            yield Called(node, operation, args, values[node], alike)


def _shape_of(value: Any) -> Hashable:
    """What tells arguments on the meta device apart: of objects that hold tensors, which object it is."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, QuantizedWeight):
        return value.scheme, *((name, _shape_of(tensor)) for name, tensor in value.tensors.items())
    if isinstance(value, tuple | list):
        return type(value), *map(_shape_of, value)
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def work_of(node: fx.Node) -> Operation | None:
    """What a node computes; None if it only fetches or views memory."""
    return operation_of(node) or TORCH_FUNCTIONS.get(node.target)


def operation_counts(graph: fx.GraphModule) -> Counter[str]:
    """How many nodes of each operation a graph has; those of torch by their name, views are not counted."""
    return Counter(work.name for node in graph.graph.nodes if (work := work_of(node)) is not None)


def meta_pages(
    workload: Workload,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int = 16,
    rounded: torch.dtype | None = None,
    kept: DcpShard = ALL_KEYS,
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


def placed_arguments(limits: DeviceLimits, args: tuple[Any, ...]) -> list[Any]:
    """Arguments on the meta device as if they were on another, for an implementation to be chosen by."""
    return [_as_if_on(limits, argument) for argument in args]


def _as_if_on(limits: DeviceLimits, argument: Any) -> Any:
    if isinstance(argument, QuantizedWeight):
        return argument.with_tensors({name: as_if_on(limits, tensor) for name, tensor in argument.tensors.items()})
    return as_if_on(limits, argument) if isinstance(argument, Tensor) else argument
