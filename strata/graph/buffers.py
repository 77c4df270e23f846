"""The buffers of a step: which node makes each, which is the last to read it, and how many bytes are alive at once.

A graph's code lets go of a value behind the last node that reads it, and an allocator takes that memory again. So the
most that is alive at once follows from shapes alone: liveness of values as in Chaitin et al. 1981, of storages here,
since views share what they look at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from strata.graph.walk import Called, placed_arguments, walk
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.fused import storage_of

# PyTorch's allocator of CUDA memory gives multiples of so many bytes (c10/cuda/CUDACachingAllocator: kMinBlockSize).
CUDA_BLOCK = 512


@dataclass(frozen=True)
class Buffer:
    """One storage that a node makes. nbytes: as an allocator gives them. first, last: places in the graph, of the node
    that makes it and of the last that reads it, or a view of it; a result lives to the end."""

    node: str
    operation: str
    module: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class BufferPlan:
    """buffers: in the order in which they are made. scratch: by place, what the implementation of a node holds beside
    arguments and result while it runs. names: of nodes, by place."""

    buffers: tuple[Buffer, ...]
    scratch: dict[int, int]
    names: tuple[str, ...]

    def alive(self, place: int) -> int:
        """Bytes while the node at a place runs."""
        return self.scratch.get(place, 0) + sum(one.nbytes for one in self.live_at(place))

    def live_at(self, place: int) -> list[Buffer]:
        """The buffers that are alive there."""
        return [one for one in self.buffers if one.first <= place <= one.last]

    @property
    def peak_place(self) -> int:
        """The first node while which the most is alive."""
        changes: Counter[int] = Counter()
        for one in self.buffers:
            changes[one.first] += one.nbytes
            changes[one.last + 1] -= one.nbytes
        best = place = alive = most = 0
        for place in range(len(self.names)):
            alive += changes[place]
            if alive + self.scratch.get(place, 0) > most:
                best, most = place, alive + self.scratch.get(place, 0)
        return best

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once."""
        return self.alive(self.peak_place) if self.names else 0

    @property
    def peak_node(self) -> str:
        return self.names[self.peak_place] if self.names else ""

    @property
    def made(self) -> int:
        """Bytes of all buffers: what a step would need if none were used again."""
        return sum(one.nbytes for one in self.buffers)


def buffer_plan(graph: fx.GraphModule, argument: Any, limits: DeviceLimits | None = None, block: int = 1) -> BufferPlan:
    """The buffers of one step of a bound graph; parameters, arguments and pages are not among them.

    argument: as for `node_costs`. limits: of the CUDA device for which the graph is bound, which need not be here: its
    kernels' own memory counts; None: that of implementations is not known. block: bytes of which an allocator gives
    multiples. Raises NotImplementedError as `node_costs` does.
    """
    nodes = list(graph.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    last_read = {node: max((places[user] for user in node.users), default=places[node]) for node in nodes}
    given = {storage_of(one) for one in _tensors(argument)}  # those of a Batch come by `getattr`
    made: dict[int, tuple[Called, int]] = {}
    ends: dict[int, int] = {}
    scratch: dict[int, int] = {}
    for called in walk(graph, argument):
        node, place = called.node, places[called.node]
        known = given.union(*({storage_of(one) for one in _tensors(value)} for value in called.args))
        for tensor in _tensors(called.result):
            storage = storage_of(tensor)
            if storage not in made and storage not in known and node.target is not getattr:
                made[storage] = called, _blocks(tensor.untyped_storage().nbytes(), block)
            if storage in made:
                ends[storage] = max(ends.get(storage, place), last_read[node])
        bound = node.meta.get("bound")
        if limits is not None and bound is not None:
            scratch[place] = _blocks(bound.scratch(*placed_arguments(limits, called.args)), block)
    buffers = (_buffer(called, nbytes, places[called.node], ends[key]) for key, (called, nbytes) in made.items())
    return BufferPlan(tuple(buffers), scratch, tuple(node.name for node in nodes))


def _buffer(called: Called, nbytes: int, first: int, last: int) -> Buffer:
    node, operation = called.node, called.operation
    return Buffer(node.name, "" if operation is None else operation.name, node.meta["module"], nbytes, first, last)


def _blocks(nbytes: int, block: int) -> int:
    return -(-nbytes // block) * block


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those that a node returns or is given, in tuples too; of other values nothing is made in a step."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        parts: Iterable[Any] = value
        for part in parts:
            yield from _tensors(part)
