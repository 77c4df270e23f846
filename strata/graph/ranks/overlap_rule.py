"""From how many tokens on `overlap` pays where copy engines send: a cost model of what stands between two attentions.

The figures are of two H200 (`docs/parallel_serving.md` has what was measured beside what is predicted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import fx

from strata.comm.cost import all_reduce_cost
from strata.graph.ranks.overlap import divisible, steps, travels
from strata.graph.ranks.row_split import AT_HALF, PARTS, TILE_COLUMNS, TILE_ROWS, RowSplit
from strata.graph.rewrite import value_of
from strata.graph.trace import operation_of, reads_state
from strata.hardware.figures import Device
from strata.hardware.links import Link, link_of
from strata.kernels.quant.quantized import QuantizedWeight

# Products hold so much of the rate of a short burst for long (cuBLAS on an H200, which its power bounds).
_SUSTAINED = 0.87
# What a message of 32 MiB beside a product, and the sum behind it, kept the stream of products beyond the bytes that
# the sum moves: 14.6 and 16.2 us (of 64 MiB nothing and 130 us, beside products that differed by more).
_ARRIVAL = 15e-6
# Time is to be won by this factor: the model leaves out that the host has more kernels to launch in steps that no CUDA
# graph holds, and that GPUs wait for the slower one.
_WON = 1.015
_TOKENS = tuple(1 << power for power in range(9, 16))


class OverlappedProduct(NamedTuple):
    """Of a weight [out, width]."""

    out: int
    width: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of the result for a token."""
        return self.out * self.dtype.itemsize


@dataclass(frozen=True)
class Stretch:
    """What is computed between two attentions, in steps between which `ranks` add up `summed` bytes for a token."""

    steps: tuple[tuple[OverlappedProduct, ...], ...]
    summed: tuple[int, ...]
    ranks: int

    @property
    def joined(self) -> int:
        """Bytes of a token that attention reads."""
        return sum(product.nbytes for product in self.steps[-1])


def overlapping_tokens(graph: fx.GraphModule, device: Device | None) -> int | None:
    """The least number of tokens from which dividing the rows of a graph makes its steps faster on a device.

    graph: as `overlap` takes it. None: never, or what its layers or the device take is not known.
    """
    stretch = last_stretch(graph)
    if stretch is None or device is None or device.cuda is None:
        return None
    try:
        link = link_of(device)
        pays = [seconds(stretch, n, 1, device, link) > _WON * seconds(stretch, n, PARTS, device, link) for n in _TOKENS]
    except ValueError:  # it has no link, or no rate for such elements
        return None
    lost = [tokens for tokens, one in zip(_TOKENS, pays, strict=True) if not one]
    return min((tokens for tokens in _TOKENS if tokens > max(lost, default=0)), default=None)


def last_stretch(graph: fx.GraphModule) -> Stretch | None:
    """What stands before the last attention; None if there is no message, or what is summed there is no product."""
    nodes = list(graph.graph.nodes)
    between = [list(group) for has_state, group in groupby(nodes, reads_state) if not has_state]
    divided = divisible(between[-2]) if len(between) > 2 else []
    at = steps(divided)
    if not divided:
        return None
    products: list[list[OverlappedProduct]] = [[] for _ in range(1 + max(at.values()))]
    summed = []
    ranks = 1
    for node in divided:
        operation = operation_of(node)
        if operation is not None and operation.product:
            products[at[node]].append(_product(graph, node))
        elif travels(node):
            (made, *_) = node.all_input_nodes
            operation = operation_of(made)
            if operation is None or not operation.product:
                return None
            summed.append(_product(graph, made).nbytes)
            ranks = node.args[1].size  # type: ignore[union-attr, assignment]
    if len(summed) + 1 != len(products):
        return None
    return Stretch(tuple(map(tuple, products)), tuple(summed), ranks)


def _product(graph: fx.GraphModule, node: fx.Node) -> OverlappedProduct:
    """Of a packed weight as if it were of the dtype of the parameters that it stands for, which is its result's."""
    source = node.args[1]
    if isinstance(source, QuantizedWeight):
        values = source.values
        assert isinstance(values, fx.Node)
        out, width = source.with_tensors({"values": value_of(graph, values)}).shape
        return OverlappedProduct(out, width, graph.get_parameter(values.meta["parameters"][0]).dtype)
    assert isinstance(source, fx.Node)
    weight = value_of(graph, source)
    return OverlappedProduct(weight.shape[0], weight.shape[1], weight.dtype)


def row_split(graph: fx.GraphModule, device: Device | None) -> RowSplit:
    """Where `overlap` best divides the rows of a graph on a device: at half, where its layers are not known."""
    stretch = last_stretch(graph)
    return AT_HALF if stretch is None or device is None or device.cuda is None else _division(stretch, device)


def _division(stretch: Stretch, device: Device) -> RowSplit:
    assert device.cuda is not None
    return RowSplit(device.cuda.processors, tuple((one.out, one.width) for step in stretch.steps for one in step))


def seconds(stretch: Stretch, tokens: int, parts: int, device: Device, link: Link) -> float:
    """The time between two attentions: products of each part in turn, and each message when its part has come so far
    and the message before it has arrived; of several parts the norm reads what arrives. parts: 1, or `PARTS`.

    Raises ValueError for a device without a rate for such elements.
    """
    boundary = _division(stretch, device).boundary(tokens)
    rows = [tokens] if parts == 1 else [boundary, tokens - boundary]
    products = [[sum(_product_seconds(one, count, device) for one in step) for count in rows] for step in stretch.steps]
    costs = [[all_reduce_cost(summed * count, stretch.ranks) for count in rows] for summed in stretch.summed]
    messages = [[link.seconds(cost.messages, cost.bytes) for cost in step] for step in costs]
    if parts == 1:
        return sum(sum(step) for step in (*products, *messages))
    memory = device.ceiling("bandwidth").value
    arrivals = [[_ARRIVAL + summed * count / memory for count in rows] for summed in stretch.summed]
    return _end(products, messages, arrivals) + 2 * stretch.joined * tokens / memory


def _end(
    products: Sequence[Sequence[float]], messages: Sequence[Sequence[float]], arrivals: Sequence[Sequence[float]]
) -> float:
    """Of each step: of each part."""
    now = sent = 0.0
    arrived = [0.0] * PARTS
    for step, lengths in enumerate(products):
        for part, length in enumerate(lengths):
            now = max(now, arrived[part]) + (arrivals[step - 1][part] if step > 0 else 0.0) + length
            if step < len(messages):
                sent = max(now, sent) + messages[step][part]
                arrived[part] = sent
    return now


def _product_seconds(product: OverlappedProduct, rows: int, device: Device) -> float:
    """Programs compute tiles, as many at a time as there are processors. device: with CUDA."""
    assert device.cuda is not None
    processors = device.cuda.processors
    rate = _SUSTAINED * device.ceiling("compute", str(product.dtype).removeprefix("torch.")).value
    rounds = RowSplit(processors).rounds(rows, product.out)
    return rounds * processors * 2 * TILE_ROWS * TILE_COLUMNS * product.width / rate
