"""The time of a training step under any layout, the least or the likely one: the work of the traced graph, at the
rates of a device, the update, and the messages nothing hides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache

from strata.comm.cost import Network
from strata.hardware.figures import Device
from strata.hardware.roofline import Cost
from strata.parallel.schedules import make_schedule
from strata.parallel.timeline import Durations, simulate
from strata.train.predict.layer_costs import PassCost
from strata.train.predict.messages import Axes, Messages, data_messages, exposed, hidden, sent
from strata.train.predict.rank_parameters import RankParameters
from strata.train.predict.rates import Rates, measured_rates, min_rates
from strata.train.predict.step_shape import TrainShape

# Passes over logits: what the product wrote is read, its gradient written, and that read again.
_LOGITS_PASSES = 3
# Bytes of a value that becomes one of 8 bits: read for the largest, read again, written as both products want it.
_QUANTIZED = 6


@dataclass(frozen=True)
class TrainingStepTime:
    """Seconds of a step on the slowest rank, one after another. bubble: waiting for other stages of a pipeline.

    traffic: norms, activations and conversions; gaps: between kernels; slowed: what computation loses beside messages;
    all three are zero in a least time. messages: by what they are for: "tensor", "context", "experts", "stages" (whose
    delay is in the bubble), "gradients", "weights". origin: of predicted seconds, one of
    `strata.hardware.prediction.ORIGINS`; "" of the least.
    """

    products: float
    attention: float
    update: float
    bubble: float = 0.0
    messages: Mapping[str, Messages] = field(default_factory=dict)
    traffic: float = 0.0
    gaps: float = 0.0
    slowed: float = 0.0
    origin: str = ""

    @property
    def communication(self) -> float:
        """What the messages add to the step."""
        return exposed(self.messages) + self.slowed

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds under the names of `strata.train.predict.step_kinds`."""
        found = {
            "products": self.products,
            "attention": self.attention,
            "optimizer": self.update,
            "communication": self.communication,
            "idle": self.bubble + self.gaps,
        }
        return found | ({"other": self.traffic} if self.traffic else {})

    @property
    def seconds(self) -> float:
        return sum(self.by_kind.values())


def min_time(shape: TrainShape, recompute: str, device: Device, network: Network | None = None) -> TrainingStepTime:
    """The least time of a step: products and attention at the device's measured rates, AdamW's bytes, and messages at
    the measured rate of the link where no computation runs that they could hide behind.

    Sequences are taken to be full, experts to get equally many tokens, and stages of a pipeline to be as slow as the
    slowest. Norms, activations and the loss's own passes over memory are left out. network: of several machines;
    without one all ranks lie in one. Raises ValueError if there are messages and nothing is known of the link.
    """
    return step_time(shape, recompute, min_rates(shape, device, network))


def predicted_time(
    shape: TrainShape, recompute: str, device: Device, network: Network | None = None
) -> TrainingStepTime:
    """What a step is likely to take: the same work at the rates that were measured inside long steps, with passes over
    memory, gaps between kernels, and what computation and messages take of each other. Raises as `min_time` does.
    """
    return step_time(shape, recompute, measured_rates(shape, device, network))


def step_time(shape: TrainShape, recompute: str, rates: Rates) -> TrainingStepTime:
    """Of the slowest rank, at such rates."""
    passes = [_Passes(shape, recompute, rates, rank) for rank in range(shape.layout.pp)]
    slowest = max(passes, key=lambda one: one.forward + one.backward)
    stages = len(shape.schedule.stages_of(0))
    work = shape.batches * (slowest.forward + slowest.backward)
    bubble, transfers = 0.0, Messages()
    if shape.layout.pp > 1:
        hop = sent(
            rates, "shift", 2 * shape.local_tokens * shape.config.hidden_size // shape.between, Axes(shape).stages
        )
        transfers = Messages(hop.cost, hop.seconds).times(2 * stages * shape.batches)
        weights = slowest.backward - slowest.inputs
        durations = Durations(slowest.forward / stages, slowest.inputs / stages, weights / stages, hop.seconds)
        bubble = _bubble(shape, durations, work / shape.batches)
    found = {name: one.times(shape.batches) for name, one in slowest.messages.items()}
    # Only within a step: a rank waits for the slowest other one before it updates.
    ends = [
        data_messages(shape, held, own.computing, rates)
        for held, own in zip(shape.local_parameters, passes, strict=True)
    ]
    latest: dict[str, Messages] = max(ends, key=exposed)
    found |= latest
    beside = hidden(found)
    found["stages"] = transfers
    spent = slowest.work
    return TrainingStepTime(
        products=shape.batches * spent.products,
        attention=shape.batches * spent.attention,
        update=max(_update_seconds(shape, held, rates) for held in shape.local_parameters),
        bubble=bubble,
        messages={name: one for name, one in found.items() if one.cost.messages},
        traffic=shape.batches * spent.traffic
        + max(_sums_seconds(shape, held, rates) for held in shape.local_parameters),
        gaps=shape.batches * spent.gaps,
        slowed=rates.slowed * beside,
        origin=rates.origin,
    )


def _bubble(shape: TrainShape, durations: Durations, work: float) -> float:
    """Waiting in a step whose micro-batches take so many seconds of work each. Once a pipeline is full each is like the
    one before, so of many the waiting follows from that of fewer.
    """
    name, ranks, shown = shape.schedule_name, shape.layout.pp, shape.alike_from(4)
    bubble = _length(name, ranks, shown, durations) - shown * work
    if shown == shape.batches:
        return bubble
    fewer = shape.alike_from(3)
    less = _length(name, ranks, fewer, durations) - fewer * work
    return bubble + (shape.batches - shown) / (shown - fewer) * (bubble - less)


# A search asks for the same pipeline under many layouts.
@lru_cache(maxsize=4096)
def _length(schedule: str, ranks: int, micro_batches: int, durations: Durations) -> float:
    return simulate(make_schedule(schedule, ranks, micro_batches), durations).length


@dataclass(frozen=True)
class _ComputeSeconds:
    """Seconds of computation, by kind."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    gaps: float = 0.0

    def __add__(self, other: _ComputeSeconds) -> _ComputeSeconds:
        return _ComputeSeconds(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.traffic + self.gaps


class _Passes:
    """The passes of one micro-batch through all stages of a rank, with the messages inside them.

    work: of both passes. computing: seconds of each without waiting. forward, backward: with it. inputs: the part of
    the backward pass that other stages wait for. messages: of both passes.
    """

    def __init__(self, shape: TrainShape, recompute: str, rates: Rates, rank: int) -> None:
        self.shape, self.rates, self.held = shape, rates, shape.local_parameters[rank]
        costs = [(shape.layer_costs[layer], count) for layer, count in self.held.unlike]
        ahead = sum((self._work(cost.forward, rates.attention, count) for cost, count in costs), _ComputeSeconds())
        back = sum(
            (self._work(cost.backward, rates.attention_backward, count) for cost, count in costs), _ComputeSeconds()
        )
        again = self._again(recompute, ahead)
        head = 2 * self.held.head * shape.local_tokens / rates.wide
        # A loss computes its logits twice unless it makes gradients of them on the spot.
        head_backward = _ComputeSeconds((2 if shape.loss_has_gradients else 3) * head, traffic=self._logits_seconds())
        self.work = ahead + back + again + head_backward + _ComputeSeconds(head)
        self.computing = (ahead.seconds + head, (back + again + head_backward).seconds)
        self.messages: dict[str, Messages] = {}
        waiting = self._inner_messages(ahead, back, again, recompute)
        self.forward, self.backward = self.computing[0] + waiting[0], self.computing[1] + waiting[1]
        self.inputs = self.backward - ahead.products - head  # all but the products that give the weights' gradients

    def _products(self, dense: float, routed: float) -> float:
        """Seconds of so many FLOPs of a token, outside experts and in them."""
        shape, rates = self.shape, self.rates
        return shape.local_tokens * (dense / shape.layout.tp / rates.dense + routed / shape.between / rates.wide)

    def _work(self, cost: PassCost, attention_rate: float, layers: int) -> _ComputeSeconds:
        shape, tokens, parts = self.shape, self.shape.local_tokens, self.shape.layout.tp
        attention = cost.attention * tokens / shape.length / parts / attention_rate
        moved = tokens * (cost.between / shape.between + cost.inside / parts)
        if shape.precision != "bf16":
            elements = cost.dense / 2 if cost.operands else 0.0
            # A weight is converted in the forward pass; the backward pass has as many elements once more for each.
            moved += _QUANTIZED * (tokens * cost.operands + elements * (attention_rate is self.rates.attention))
        products, gaps = self._products(cost.dense, cost.routed), cost.kernels * self.rates.gap
        each = (products, attention, self._traffic_seconds(moved), gaps)
        return _ComputeSeconds(*(layers * seconds for seconds in each))

    def _again(self, recompute: str, ahead: _ComputeSeconds) -> _ComputeSeconds:
        """What the backward pass computes again of a forward pass of the layers."""
        if recompute == "none":
            return _ComputeSeconds()
        shape, config, experts = self.shape, self.shape.config, self.shape.config.experts
        products = 0.0
        for layer, count in self.held.unlike:
            cost = shape.layer_costs[layer].forward
            if experts is not None and experts.layers[layer]:
                matrix = self._products(0, 2 * config.hidden_size * experts.per_token * experts.intermediate_size)
                mlp, last = self._products(0, cost.routed), 0.0
            else:
                matrix = self._products(2 * config.hidden_size * config.intermediate_size, 0)
                # Torch stops before a last product whose result nobody reads, unless messages travel in its operation.
                mlp, last = 3 * matrix, 0.0 if shape.layout.overlap else matrix
            ways = {
                "operations": 0.0,
                "mlp": 2 * matrix if shape.runs_graph else mlp - last,
                "layers": self._products(cost.dense, cost.routed) - last,
            }
            products += count * ways[recompute]
        attention = ahead.attention if recompute == "layers" else 0.0
        share = 1.0 if shape.runs_graph or recompute == "layers" else 0.5  # of an MLP alone
        return _ComputeSeconds(products, attention, ahead.traffic * share, ahead.gaps * share)

    def _logits_seconds(self) -> float:
        logits = self.shape.local_tokens * self.held.head / self.shape.config.hidden_size
        return self._traffic_seconds(_LOGITS_PASSES * 2 * logits)

    def _traffic_seconds(self, moved: float) -> float:
        return 0.0 if self.rates.traffic is None else moved / self.rates.traffic

    def _inner_messages(
        self, ahead: _ComputeSeconds, back: _ComputeSeconds, again: _ComputeSeconds, recompute: str
    ) -> tuple[float, float]:
        """What waiting for messages inside the layers adds to the forward and to the backward pass."""
        forward, backward = 0.0, 0.0
        for name, (there, home) in {
            "tensor": self._tensor(ahead, back, again, recompute),
            "context": self._context(ahead, back, again=recompute == "layers"),
            "experts": self._experts(again=recompute in ("mlp", "layers")),
        }.items():
            self.messages[name] = there + home
            forward, backward = forward + there.exposed, backward + home.exposed
        return forward, backward

    def _tensor(
        self, ahead: _ComputeSeconds, back: _ComputeSeconds, again: _ComputeSeconds, recompute: str
    ) -> tuple[Messages, Messages]:
        """Around attention and the MLP the ranks gather tokens and sum products, or sum alone, which is as much."""
        shape, layout, config = self.shape, self.shape.layout, self.shape.config
        size, axis = 2 * shape.local_tokens * config.hidden_size, Axes(shape).tensor
        sparse = (False,) * config.num_layers if config.experts is None else config.experts.layers
        # Experts are whole on each rank of tp. Embedding and head are half a block each.
        dense = sum(count for layer, count in self.held.unlike if not sparse[layer])
        blocks = len(self.held.layers) + dense
        ends = (self.held.embedding > 0) + (self.held.head > 0)
        whole = [sent(self.rates, one, size, axis) for one in ("all_gather", "reduce_scatter")]
        calls = whole if layout.sequence_parallel else [sent(self.rates, "all_reduce", size, axis)]
        block = sum(calls, Messages())
        there, home = block.times(blocks), block.times(blocks + ends)
        if layout.overlap:
            home += whole[0].times(blocks)  # what was gathered is gathered once more
            repeated = block.times({"mlp": dense, "layers": blocks}.get(recompute, 0))
            return there.behind(ahead.products), repeated.behind(again.products) + home.behind(back.products)
        if recompute == "layers":
            # All but the sum of a last product that is not computed again; so of an MLP alone there is none.
            *before, last = calls
            home += sum((one.times(blocks) for one in before), last.times(blocks - dense))
        return there, home

    def _context(self, ahead: _ComputeSeconds, back: _ComputeSeconds, *, again: bool) -> tuple[Messages, Messages]:
        shape, layout, config = self.shape, self.shape.layout, self.shape.config
        layers, ranks, axis = len(self.held.layers), layout.cp, Axes(shape).context
        queries, keys = (
            2 * shape.local_tokens * heads * config.head_dim // layout.tp
            for heads in (config.num_heads, config.num_kv_heads)
        )
        if layout.context == "ulysses":
            copies = max(1, ranks * layout.tp // config.num_kv_heads)
            each = [queries, queries, copies * keys, copies * keys]
            there = sum((sent(self.rates, "all_to_all", size, axis) for size in each), Messages()).times(layers)
            return there, there.times(2 if again else 1)
        shift = sent(self.rates, "shift", 2 * keys, axis)
        gradients = sent(self.rates, "shift", 4 * keys, axis)  # float32
        there = shift.times((ranks - 1) * layers).behind(ahead.attention)
        # The last shift of gradients goes home when nothing is left to compute.
        home = (shift + gradients).times((ranks - 1) * layers).behind(back.attention)
        home += gradients.times(layers)
        return there, there + home if again else home

    def _experts(self, *, again: bool) -> tuple[Messages, Messages]:
        shape, layout, experts = self.shape, self.shape.layout, self.shape.config.experts
        if experts is None:
            return Messages(), Messages()
        axis = Axes(shape).experts
        layers = sum(count for layer, count in self.held.unlike if experts.layers[layer])
        rows = int(shape.local_tokens // shape.between * shape.ranks_of_token)
        # Rows of hidden states; their weights (float32), as much as the numbers of their experts; how many there are.
        vectors, weights, counts = (
            sent(self.rates, "all_to_all", size, axis)
            for size in (2 * rows * shape.config.hidden_size, 4 * rows * experts.per_token, 16 * layout.ep)
        )
        there = vectors + weights.times(2) + counts
        home = vectors.times(2) + weights
        # What comes home is only added up, so computed again no row does.
        return (there + vectors).times(layers), (there + home if again else home).times(layers)


def _gradient_bytes(shape: TrainShape) -> int:
    """Of an element that the update reads."""
    return 2 if shape.layout.ranks == shape.batches == 1 else 4


def _update_seconds(shape: TrainShape, held: RankParameters, rates: Rates) -> float:
    """AdamW reads and writes master and moments (float32), reads the gradient and writes the weight (bfloat16); what
    lies on the host comes and goes over its link, both at once."""
    parameters, gradient = shape.updated(held), _gradient_bytes(shape)
    cost = Cost(read=(12 + gradient) * parameters, written=14 * parameters)
    if rates.host is None:
        return cost.bytes / rates.update
    streamed = (8 if shape.layout.zero == 3 else 12) * parameters  # FSDP's masters, which are the weights, stay
    return max(cost.bytes / rates.update, streamed / rates.host)


def _sums_seconds(shape: TrainShape, held: RankParameters, rates: Rates) -> float:
    """The norm of all gradients; of several batches their sums, whose parts ZeRO-2 adds up where they arrive; and what
    FSDP copies of weights and gradients."""
    if rates.traffic is None:
        return 0.0
    own = shape.updated(held)
    moved = _gradient_bytes(shape) * own
    if shape.layout.zero >= 2:
        moved += 12 * own * (shape.batches - 1)
    if shape.layout.zero == 3:
        moved += rates.copied * held.total * shape.batches
    return moved / rates.traffic
