"""The messages of a training step, by what they are for: seconds on the wire, and what no computation hides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.comm.cost import CollectiveCost
from strata.parallel.buckets import BUCKET_ELEMENTS
from strata.parallel.quantized_sums import message_bytes
from strata.train.predict.rank_parameters import RankParameters
from strata.train.predict.rates import Rates
from strata.train.predict.step_shape import TrainShape


@dataclass(frozen=True)
class Messages:
    """One kind of message in a step. cost: what a rank sends. seconds: on the link. exposed: those nothing hides."""

    cost: CollectiveCost = field(default_factory=CollectiveCost)
    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: Messages) -> Messages:
        return Messages(self.cost + other.cost, self.seconds + other.seconds, self.exposed + other.exposed)

    def times(self, count: int) -> Messages:
        """The same so many times."""
        cost = CollectiveCost(self.cost.messages * count, self.cost.bytes * count)
        return Messages(cost, self.seconds * count, self.exposed * count)

    def behind(self, seconds: float) -> Messages:
        """The same while so many seconds of computation run beside."""
        return Messages(self.cost, self.seconds, max(0.0, self.seconds - seconds))

    def at_least(self, exposed: float) -> Messages:
        """The same, of which at least so many seconds cannot be hidden."""
        return Messages(self.cost, self.seconds, min(self.seconds, max(self.exposed, exposed)))


def exposed(messages: Mapping[str, Messages]) -> float:
    """Seconds of all kinds that nothing hides."""
    return sum(one.exposed for one in messages.values())


def hidden(messages: Mapping[str, Messages]) -> float:
    """Seconds of all kinds beside computation."""
    return sum(one.seconds - one.exposed for one in messages.values())


@dataclass(frozen=True)
class AxisRanks:
    """How many ranks an axis has, and how far apart they are in the order of all (`strata.comm.mesh.AXES`)."""

    size: int
    stride: int


class Axes:
    """Those of a layout, by what crosses them."""

    def __init__(self, shape: TrainShape) -> None:
        layout = shape.layout
        dense, experts = shape.data_ranks
        documents = layout.tp * layout.shard * layout.cp
        self.tensor = AxisRanks(layout.tp, 1)
        self.context = AxisRanks(layout.cp, layout.tp)
        self.experts = AxisRanks(layout.ep, layout.tp)
        self.stages = AxisRanks(layout.pp, documents * layout.dp)
        # What ZeRO divides, and what holds the same part of it.
        self.dense = AxisRanks(dense, layout.tp)
        self.dense_replicas = AxisRanks(layout.dp * layout.shard * layout.cp // dense, layout.tp * dense)
        self.routed = AxisRanks(experts, layout.tp * layout.ep)
        self.routed_replicas = AxisRanks(
            layout.dp * layout.shard * layout.cp // layout.ep // experts, layout.tp * layout.ep * experts
        )


def sent(rates: Rates, collective: str, nbytes: int, axis: AxisRanks, calls: int = 1, share: float = 1.0) -> Messages:
    """A collective of `strata.comm.cost`, its bytes sent in so many calls one after another; nothing along an
    axis of one rank."""
    if rates.network is None or axis.size == 1:
        return Messages()
    cost = rates.network.cost(collective, nbytes, axis.size, axis.stride)
    whole = cost.inside + cost.across
    if not whole.bytes:
        return Messages()
    seconds = rates.network.seconds(cost, calls, share)
    return Messages(CollectiveCost(whole.messages * calls, whole.bytes), seconds, seconds)


def data_messages(
    shape: TrainShape, held: RankParameters, computing: tuple[float, float], rates: Rates
) -> dict[str, Messages]:
    """Gradients are summed while the backward pass goes on, weights gathered while the next forward pass does.

    computing: seconds of the forward and of the backward pass of a batch, without waiting.
    """
    layout, (forward, backward) = shape.layout, computing
    calls = max(1, min(len(held.layers) + 2, held.total // BUCKET_ELEMENTS))  # whole layers, as many as fill a message
    gradients = _reduction(shape, rates, 4 * held.dense, 4 * held.experts, calls)
    gathering = _gather(shape, rates, 2 * held.dense, 2 * held.experts, calls)
    if layout.zero == 3:
        # The backward pass gathers once more, and that and the sums share what room it has.
        ahead, again = gathering.behind(forward), gathering.behind(backward)
        sums = gradients.behind(max(0.0, backward - again.seconds))
        # The ends, and the first layer, must be there before anything can be computed.
        first = _gather(shape, rates, 2 * (held.total - held.in_layers + held.mean_layer), 0, 2).seconds
        weights = (ahead + again).at_least(first)
        return {"gradients": sums.times(shape.batches), "weights": weights.times(shape.batches)}
    # ZeRO-2 sums after every pass, the others once. What is complete last is the embedding, or a message of layers.
    times = shape.batches if layout.zero == 2 else 1
    tail = min(held.total, max(BUCKET_ELEMENTS, held.embedding))
    late = _reduction(shape, rates, 4 * tail, 0, 1).seconds
    found = {"gradients": gradients.behind(backward).at_least(late).times(times)}
    if layout.zero:
        # Modules wait for all weights; the graph computes with those that are there.
        room = forward if shape.runs_graph else 0.0
        found["weights"] = gathering.behind(room).at_least(_gather(shape, rates, 2 * tail, 0, 1).seconds)
    return found


def _reduction(shape: TrainShape, rates: Rates, dense: int, experts: int, calls: int) -> Messages:
    """The sum of so many bytes of float32 gradients outside experts and in them, each in so many calls."""
    axes = Axes(shape)
    # What is whole after the sum over the ranks that divide it, goes on over those that repeat it.
    found = [
        ("reduce_scatter", dense, axes.dense),
        ("all_reduce", dense // axes.dense.size, axes.dense_replicas),
        ("reduce_scatter", experts, axes.routed),
        ("all_reduce", experts // axes.routed.size, axes.routed_replicas),
    ]
    if shape.layout.sequence_parallel:  # each rank of tp saw a part of the tokens
        found.append(("all_reduce", experts // axes.routed.size, axes.tensor))
    if shape.layout.message_dtype == "fp8":
        found = [small for one in found for small in _quantized(*one, is_fsdp=shape.layout.zero == 3)]
    return sum((sent(rates, *one, calls, rates.beside) for one in found), Messages())


def _quantized(collective: str, nbytes: int, axis: AxisRanks, *, is_fsdp: bool) -> list[tuple[str, int, AxisRanks]]:
    """What stands for the sum of so many bytes in float32 (`strata.parallel.quantized_sums`); FSDP2 sums over replicas
    by itself."""
    if collective == "all_reduce" and is_fsdp:
        return [(collective, nbytes, axis)]
    back = ["all_gather"] if collective == "all_reduce" else []
    return [(name, message_bytes(nbytes // 4), axis) for name in ("all_to_all", *back)]


def _gather(shape: TrainShape, rates: Rates, dense: int, experts: int, calls: int) -> Messages:
    """Of so many bytes outside experts and in them, over the ranks that ZeRO divides them among."""
    axes = Axes(shape)
    each = ((dense, axes.dense), (experts, axes.routed))
    return sum((sent(rates, "all_gather", size, axis, calls, rates.beside) for size, axis in each), Messages())
