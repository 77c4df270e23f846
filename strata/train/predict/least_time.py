"""The least time of a training step under any layout: products, attention, update, and the messages nothing hides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strata.comm.cost import (
    CollectiveCost,
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    reduce_scatter_cost,
    shift_cost,
)
from strata.hardware.figures import Device
from strata.hardware.links import LINKS, Link
from strata.hardware.roofline import Cost, floor
from strata.parallel.buckets import BUCKET_ELEMENTS
from strata.parallel.timeline import Durations, simulate
from strata.train.predict.step_shape import RankParameters, StepShape


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


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the slowest rank, one after another. bubble: waiting for other stages of a pipeline.

    messages: by what they are for: "tensor", "context", "experts", "stages" (whose delay is in the bubble),
    "gradients", "weights".
    """

    products: float
    attention: float
    update: float
    bubble: float = 0.0
    messages: Mapping[str, Messages] = field(default_factory=dict)

    @property
    def communication(self) -> float:
        """What the messages add to the step."""
        return _exposed(self.messages)

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds under the names of `strata.train.predict.step_kinds`."""
        return {
            "products": self.products,
            "attention": self.attention,
            "optimizer": self.update,
            "communication": self.communication,
            "idle": self.bubble,
        }

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.update + self.bubble + self.communication


def least_time(shape: StepShape, recompute: str, device: Device) -> StepTime:
    """The least time of a step: products and attention at the device's measured rates, AdamW's bytes, and messages at
    the measured rate of the link where no computation runs that they could hide behind.

    All ranks are taken to lie in one machine, sequences to be full, experts to get equally many tokens, and stages of a
    pipeline to be as slow as the slowest. Norms, activations and the loss's own passes over memory are left out.
    Raises ValueError if there are messages and the device's link is not known.
    """
    link = _link(shape, device)
    passes = [_Passes(shape, recompute, device, link, rank) for rank in range(shape.layout.pp)]
    slowest = max(passes, key=lambda one: one.forward + one.backward)
    stages = len(shape.schedule.stages_of(0))
    work = shape.batches * (slowest.forward + slowest.backward)
    bubble, transfers = 0.0, Messages()
    if shape.layout.pp > 1 and link is not None:
        hop = _messages(link, shift_cost(2 * shape.own_tokens * shape.config.hidden_size // shape.between, 2))
        transfers = Messages(hop.cost, hop.seconds).times(2 * stages * shape.batches)
        weights = slowest.backward - slowest.inputs
        durations = Durations(slowest.forward / stages, slowest.inputs / stages, weights / stages, hop.seconds)
        bubble = simulate(shape.schedule, durations).length - work
    found = {name: one.times(shape.batches) for name, one in slowest.messages.items()}
    found["stages"] = transfers
    # Only within a step: a rank waits for the slowest other one before it updates.
    ends = [_data_messages(shape, held, own, link) for held, own in zip(shape.held, passes, strict=True)]
    latest: dict[str, Messages] = max(ends, key=_exposed)
    found |= latest
    return StepTime(
        products=shape.batches * slowest.products,
        attention=shape.batches * slowest.attention,
        update=max(_update_seconds(shape, held, device) for held in shape.held),
        bubble=bubble,
        messages={name: one for name, one in found.items() if one.cost.messages},
    )


def _exposed(messages: Mapping[str, Messages]) -> float:
    return sum(one.exposed for one in messages.values())


def _link(shape: StepShape, device: Device) -> Link | None:
    if shape.layout.ranks == 1:
        return None
    if device.key not in LINKS:
        raise ValueError(
            f"the link between several {device.key} is not measured; known are {', '.join(LINKS)}. "
            f"Estimate one rank, or one of those devices"
        )
    return LINKS[device.key]


class _Passes:
    """Seconds of the passes of one micro-batch through all stages of a rank, with the messages inside them.

    computing: forward and backward without waiting. inputs: the part of the backward pass that other stages wait for.
    messages: of both passes.
    """

    def __init__(self, shape: StepShape, recompute: str, device: Device, link: Link | None, rank: int) -> None:
        self.shape, self.held = shape, shape.held[rank]
        product, product_again = self._product_seconds(device, recompute)
        attention = self._attention_seconds(device)
        repeated = product_again + (attention if recompute == "layers" else 0.0)
        head = 2 * self.held.head * shape.own_tokens / device.ceiling("compute", "bfloat16").value
        # A loss computes its logits twice unless it makes gradients of them on the spot.
        head_backward = (2 if shape.loss_has_gradients else 3) * head
        self.products = 3 * product + product_again + head + head_backward
        self.attention = 3 * attention + repeated - product_again
        self.messages: dict[str, Messages] = {}
        self.computing = (product + attention + head, 2 * (product + attention) + head_backward + repeated)
        waiting = (0.0, 0.0)
        if link is not None:
            waiting = self._inner_messages(link, (product, product_again), attention, recompute)
        self.forward, self.backward = self.computing[0] + waiting[0], self.computing[1] + waiting[1]
        self.inputs = self.backward - product - head  # all but the products that give the weights' gradients

    def _product_seconds(self, device: Device, recompute: str) -> tuple[float, float]:
        """Of the products of the layers: one forward pass, and what of it the backward pass computes again."""
        shape, config = self.shape, self.shape.config
        rate = device.ceiling("compute", "bfloat16").value
        fast = rate if shape.precision == "bf16" else device.ceiling("compute", "float8").value
        # Seconds of an element of a matrix that every token meets, and of one of an expert.
        dense, sparse = 2 * shape.own_tokens / shape.layout.tp / fast, 2 * shape.own_tokens / shape.between / rate
        once = again = 0.0
        for layer in self.held.layers:
            cost = shape.layer_costs[layer]
            each = config.hidden_size * config.intermediate_size
            widest, mlp = 2 * each * dense, 3 * each * dense
            # Torch stops before a last product whose result nobody reads, unless messages travel in its operation.
            last = 0.0 if shape.layout.overlap else each * dense
            if config.experts is not None and config.experts.layers[layer]:
                experts = config.experts
                each = config.hidden_size * experts.intermediate_size
                widest, mlp, last = 2 * experts.per_token * each * sparse, cost.routed / 2 * sparse, 0.0
            seconds = cost.dense / 2 * dense + cost.routed / 2 * sparse
            once += seconds
            mlp_again = widest if shape.runs_graph else mlp - last
            again += {"none": 0.0, "operations": 0.0, "mlp": mlp_again, "layers": seconds - last}[recompute]
        return once, again

    def _attention_seconds(self, device: Device) -> float:
        """Of one forward pass."""
        shape = self.shape
        sequences = shape.own_tokens / shape.length
        flops = sum(shape.layer_costs[layer].attention for layer in self.held.layers)
        return flops * sequences / shape.layout.tp / device.ceiling("compute", "bfloat16").value

    def _inner_messages(
        self, link: Link, products: tuple[float, float], attention: float, recompute: str
    ) -> tuple[float, float]:
        """What waiting for messages inside the layers adds to the forward and to the backward pass.

        products: seconds of one forward pass, and of what is computed again.
        """
        forward, backward = 0.0, 0.0
        for name, (ahead, back) in {
            "tensor": self._tensor(link, products, recompute),
            "context": self._context(link, attention, again=recompute == "layers"),
            "experts": self._experts(link, again=recompute in ("mlp", "layers")),
        }.items():
            self.messages[name] = ahead + back
            forward, backward = forward + ahead.exposed, backward + back.exposed
        return forward, backward

    def _tensor(self, link: Link, products: tuple[float, float], recompute: str) -> tuple[Messages, Messages]:
        """Around attention and the MLP the ranks gather tokens and sum products, or sum alone, which is as much."""
        shape, layout, config = self.shape, self.shape.layout, self.shape.config
        if layout.tp == 1:
            return Messages(), Messages()
        size = 2 * shape.own_tokens * config.hidden_size
        sparse = (False,) * config.num_layers if config.experts is None else config.experts.layers
        # Experts are whole on each rank of tp. Embedding and head are half a block each.
        dense = sum(not sparse[layer] for layer in self.held.layers)
        blocks = len(self.held.layers) + dense
        ends = (self.held.embedding > 0) + (self.held.head > 0)
        whole = [all_gather_cost(size, layout.tp), reduce_scatter_cost(size, layout.tp)]
        calls = whole if layout.sequence_parallel else [all_reduce_cost(size, layout.tp)]
        block = sum((_messages(link, call) for call in calls), Messages())
        ahead, back = block.times(blocks), block.times(blocks + ends)
        if layout.overlap:
            back += _messages(link, whole[0]).times(blocks)  # what was gathered is gathered once more
            again = block.times({"mlp": dense, "layers": blocks}.get(recompute, 0))
            product, product_again = products
            return _behind(ahead, product), _behind(again, product_again) + _behind(back, 2 * product)
        if recompute == "layers":
            # All but the sum of a last product that is not computed again; so of an MLP alone there is none.
            *before, last = (_messages(link, call) for call in calls)
            back += sum((one.times(blocks) for one in before), last.times(blocks - dense))
        return ahead, back

    def _context(self, link: Link, attention: float, *, again: bool) -> tuple[Messages, Messages]:
        shape, layout, config = self.shape, self.shape.layout, self.shape.config
        if layout.cp == 1:
            return Messages(), Messages()
        layers, ranks = len(self.held.layers), layout.cp
        queries, keys = (
            2 * shape.own_tokens * heads * config.head_dim // layout.tp
            for heads in (config.num_heads, config.num_kv_heads)
        )
        if layout.context == "ulysses":
            copies = max(1, ranks * layout.tp // config.num_kv_heads)
            each = [queries, queries, copies * keys, copies * keys]
            ahead = sum((_messages(link, all_to_all_cost(size, ranks)) for size in each), Messages()).times(layers)
            return ahead, ahead.times(2 if again else 1)
        shift = _messages(link, shift_cost(2 * keys, ranks))
        gradients = _messages(link, shift_cost(4 * keys, ranks))  # float32
        ahead = _behind(shift.times((ranks - 1) * layers), attention)
        # The last shift of gradients goes home when nothing is left to compute.
        back = _behind((shift + gradients).times((ranks - 1) * layers), 2 * attention)
        back += gradients.times(layers)
        return ahead, ahead + back if again else back

    def _experts(self, link: Link, *, again: bool) -> tuple[Messages, Messages]:
        shape, layout, experts = self.shape, self.shape.layout, self.shape.config.experts
        if layout.ep == 1 or experts is None:
            return Messages(), Messages()
        layers = sum(experts.layers[layer] for layer in self.held.layers)
        rows = int(shape.own_tokens // shape.between * shape.ranks_of_token)
        # Rows of hidden states; their weights (float32), as much as the numbers of their experts; how many there are.
        vectors, weights, counts = (
            _messages(link, all_to_all_cost(size, layout.ep))
            for size in (2 * rows * shape.config.hidden_size, 4 * rows * experts.per_token, 16 * layout.ep)
        )
        there = vectors + weights.times(2) + counts
        back = vectors.times(2) + weights
        # What comes home is only added up, so computed again no row does.
        return (there + vectors).times(layers), (there + back if again else back).times(layers)


def _data_messages(shape: StepShape, held: RankParameters, passes: _Passes, link: Link | None) -> dict[str, Messages]:
    """Gradients are summed while the backward pass goes on, weights gathered while the next forward pass does."""
    if link is None:
        return {}
    layout = shape.layout
    forward, backward = passes.computing
    calls = max(1, min(len(held.layers) + 2, held.total // BUCKET_ELEMENTS))  # whole layers, as many as fill a message
    gradients = _reduction(shape, link, 4 * held.dense, 4 * held.experts, calls)
    gathering = _gather(shape, link, 2 * held.dense, 2 * held.experts, calls)
    if layout.zero == 3:
        # The backward pass gathers once more, and that and the sums share what room it has.
        ahead, again = _behind(gathering, forward), _behind(gathering, backward)
        sums = _behind(gradients, max(0.0, backward - again.seconds))
        # The ends, and the first layer, must be there before anything can be computed.
        first = _gather(shape, link, 2 * (held.total - held.in_layers + held.mean_layer), 0, 2).seconds
        weights = _at_least(ahead + again, first)
        return {"gradients": sums.times(shape.batches), "weights": weights.times(shape.batches)}
    # ZeRO-2 sums after every pass, the others once. What is complete last is the embedding, or a message of layers.
    times = shape.batches if layout.zero == 2 else 1
    tail = min(held.total, max(BUCKET_ELEMENTS, held.embedding))
    late = _reduction(shape, link, 4 * tail, 0, 1).seconds
    found = {"gradients": _at_least(_behind(gradients, backward), late).times(times)}
    if layout.zero:
        # Modules wait for all weights; the graph computes with those that are there.
        room = forward if shape.runs_graph else 0.0
        found["weights"] = _at_least(_behind(gathering, room), _gather(shape, link, 2 * tail, 0, 1).seconds)
    return found


def _reduction(shape: StepShape, link: Link, dense: int, experts: int, calls: int) -> Messages:
    """The sum of so many bytes of float32 gradients outside experts and in them, each in so many calls."""
    layout = shape.layout
    all_ranks = layout.dp * layout.shard * layout.cp
    of_dense, of_experts = shape.data_ranks
    # What is whole after the sum over the ranks that divide it, goes on over those that repeat it.
    costs = [
        reduce_scatter_cost(dense, of_dense),
        all_reduce_cost(dense // of_dense, all_ranks // of_dense),
        reduce_scatter_cost(experts, of_experts),
        all_reduce_cost(experts // of_experts, all_ranks // layout.ep // of_experts),
    ]
    if layout.sequence_parallel:  # each rank of tp saw a part of the tokens
        costs.append(all_reduce_cost(experts // of_experts, layout.tp))
    return sum((_messages(link, cost, calls) for cost in costs), Messages())


def _gather(shape: StepShape, link: Link, dense: int, experts: int, calls: int) -> Messages:
    """Of so many bytes outside experts and in them, over the ranks that ZeRO divides them among."""
    costs = [all_gather_cost(size, ranks) for size, ranks in zip((dense, experts), shape.data_ranks, strict=True)]
    return sum((_messages(link, cost, calls) for cost in costs), Messages())


def _messages(link: Link, cost: CollectiveCost, calls: int = 1) -> Messages:
    """A collective, its bytes sent in so many calls one after another."""
    if not cost.bytes:
        return Messages()
    whole = CollectiveCost(cost.messages * calls, cost.bytes)
    seconds = link.seconds(whole.messages, whole.bytes) + link.start * (calls - 1)
    return Messages(whole, seconds, seconds)


def _behind(messages: Messages, seconds: float) -> Messages:
    """The same while so many seconds of computation run beside."""
    return Messages(messages.cost, messages.seconds, max(0.0, messages.seconds - seconds))


def _at_least(messages: Messages, exposed: float) -> Messages:
    """The same, of which at least so many seconds cannot be hidden."""
    return Messages(messages.cost, messages.seconds, min(messages.seconds, max(messages.exposed, exposed)))


def _update_seconds(shape: StepShape, held: RankParameters, device: Device) -> float:
    """AdamW reads and writes master and moments (float32), reads the gradient and writes the weight (bfloat16)."""
    dense, experts = shape.data_ranks
    parameters = held.dense // dense + held.experts // experts
    gradient = 2 if shape.layout.ranks == shape.batches == 1 else 4
    cost = Cost(read=(12 + gradient) * parameters, written=14 * parameters)
    return floor(cost, device, "bfloat16").seconds
