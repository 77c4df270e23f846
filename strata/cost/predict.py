"""How long a step takes: each node by what was measured of its kind or by the roofline, its messages, its launches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from strata.cost import quantized_times
from strata.cost.all_reduce_times import AllReduceTimes
from strata.cost.attention_times import TIMES, Attends, AttentionTimes
from strata.cost.efficiency import KINDS, EfficiencyTable
from strata.cost.evidence import Evidence
from strata.cost.nodes import NodeCost
from strata.cost.quantized_times import QuantizedTimes
from strata.hardware.figures import Device
from strata.hardware.links import HIDDEN, Link
from strata.hardware.prediction import ORIGINS, FittedTimes, Prediction
from strata.hardware.roofline import Cost, Workload, floor
from strata.kernels.quant.quantized import Scheme, multiplied_in

# What stands for a product of which nothing was measured: the same product without what is fused with it.
_PLAIN = "linear"
# What the host takes to launch an operation of a step that no CUDA graph holds, where it does nothing else: 15 ms for
# 28 layers of nine operations each beside an H200, and up to 43 in a served load.
HOST_SECONDS = 60e-6
# The algorithms that sum over ranks, by the kernel that they launch; where it is not Strata's, NCCL.
_ALGORITHMS = {
    "one_shot_kernel": "one shot",
    "one_shot_norm_kernel": "one shot and norm",
    "one_shot_received_norm_kernel": "one shot and norm",
    "flag_norm_kernel": "flags and norm",
    "two_shot_kernel": "two shots",
}
_NORMED = ("all_reduce_add_rms_norm", "linear_all_reduce_add_rms_norm")
_SUMS = ("all_reduce", "start_all_reduce", *_NORMED)
# In one shot a rank sends all that it has to each other one, whether that is added up there or not.
_GATHERS = "gather_rows_kernel"
_NORM = "add_rms_norm"
# What passes over memory as another does that was measured.
_ALIKE = {
    "finish_add_rms_norm": _NORM,
    "rms_norm_round": "rms_norm",
    "wide_rms_norm_round": "wide_rms_norm",
    "add_rms_norm_round": _NORM,
    "silu_mul_round": "silu_mul",
    "vocabulary_embedding": "embedding",
    "best_in_shard": "gumbel_sample",
}
# Where packed weights were not measured, however few bits they have, a product of few rows takes as long as so many
# bytes of each otherwise: 218 M of a layer of 8B 61.4 us in 8 bits and 61.5 in 4, in a chain on an H200 (docs/log.md).
_PACKED_BYTES = 1.2
# Rounds rows that nothing ahead of the product rounds.
_ROUNDS = "round_rows_kernel"
_DECODES, _PROMPTS = "decode_attention", "attention"


@dataclass(frozen=True)
class StepPredictor:
    """Predicts steps of a model in `dtype` on a device.

    tables: utilization by operation. prompts: of their attention by its FLOPs, None if too little was measured. link:
    to the other ranks, None if there are none. sums: of ranks' sums, by algorithm, None where none was measured. ranks:
    how many add up. attention_times: of attention whose programs are known, quantized_times: of what multiplies by
    packed weights, and of experts by any, None where those were not measured. launch: seconds that the host takes to
    launch an operation of a step that no CUDA graph holds, while the device may still work; 0 of a processor, which is
    the host.
    """

    device: Device
    dtype: str
    tables: Mapping[str, EfficiencyTable]
    prompts: FittedTimes | None = None
    link: Link | None = None
    sums: AllReduceTimes | None = None
    ranks: int = 1
    attention_times: AttentionTimes | None = None
    quantized_times: QuantizedTimes | None = None
    surest: str = ORIGINS[0]
    launch: float = HOST_SECONDS

    @staticmethod
    def of(found: Evidence, dtype: str, link: Link | None = None, ranks: int = 1) -> StepPredictor:
        """By the calls that were measured of a device; without any all is analytic. Of calls that were borrowed
        attention and packed weights take the lender's times, too, and nothing is surer than interpolated."""
        device, calls, loan = found.device, found.calls, found.loan
        tables = {operation: EfficiencyTable.of(device, each) for operation, each in calls.items()}
        if found.products is not None:
            tables.setdefault(_PLAIN, found.products)
        prompts = FittedTimes.of(
            (KINDS[kind].cost(dtype, shape).flops, seconds)
            for kind, of_dtype, shape, seconds in calls.get(_PROMPTS, ())
            if of_dtype == dtype and kind in ("attention", "prompt")
        )
        sums = None if link is None else AllReduceTimes.of(calls.get("all_reduce", ()), link.latency)
        product = device.product if loan is None else loan.lender.product
        by_attention, by_weights, surest = TIMES.get(product), quantized_times.TIMES.get(product), ORIGINS[0]
        if loan is not None:
            by_attention = None if by_attention is None else by_attention.with_memory(loan.memory)
            by_weights = None if by_weights is None else by_weights.with_memory(loan.memory)
            surest = ORIGINS[1]
        return StepPredictor(device, dtype, tables, prompts, link, sums, ranks, by_attention, by_weights, surest)

    @property
    def knows_calls(self) -> bool:
        """Whether any call was measured, here or on a device that is like this one; else all is analytic."""
        measured = self.tables, self.prompts, self.sums, self.attention_times, self.quantized_times
        return any(one for one in measured)

    def step(self, nodes: Iterable[NodeCost], workload: Workload, *, captured: bool) -> Prediction:
        """All nodes one after the other, beside them sums over ranks that were begun; or, unless the step is captured,
        until the host has launched them; and what is around them in an engine: copies of
        inputs and ids, the start of a graph, and until the next step begins.

        workload: the sequences without padding. The nodes are those of the size to which a step is padded.
        """
        ran = list(nodes)
        return self.together(ran, [self.node(node, workload) for node in ran], captured=captured)

    def together(self, nodes: Sequence[NodeCost], each: Sequence[Prediction], *, captured: bool) -> Prediction:
        """As `step`, of nodes that were predicted each."""
        found = replace(Prediction.total(each), seconds=_end(nodes, [one.seconds for one in each]))
        if not captured:
            found = _at_least(found, len(nodes) * self.launch)
        return replace(found, seconds=found.seconds + self._seconds("step"))

    def launches(self, operations: int) -> float:
        """The least time of a step of so many operations that the host launches."""
        return operations * self.launch + self._seconds("step")

    def attention(self, cost: Cost, workload: Workload, attends: Attends | None = None) -> Prediction:
        """One layer's attention of a step. attends: what runs it, where that is known."""
        found = self._attention(cost, workload, attends) or Prediction(
            floor(cost, self.device, self.dtype).seconds, "analytic"
        )
        return self._as_sure(_at_least(found, self._seconds("kernel")))

    def recurrence(self, cost: Cost) -> Prediction:
        """One operation of fixed states of a step, of which nothing was measured."""
        found = Prediction(floor(cost, self.device, self.dtype).seconds, "analytic")
        return _at_least(found, self._seconds("kernel"))

    def node(self, node: NodeCost, workload: Workload) -> Prediction:
        """A node of a step: no less than its kernels take in a CUDA graph however little they do."""
        return self._as_sure(_at_least(self._work(node, workload), len(node.kernels) * self._seconds("kernel")))

    def roofline(self, cost: Cost, dtype: str = "") -> float:
        """Seconds, messages aside. dtype: in which it is computed, empty or without a peak here: the model's."""
        return max(cost.flops / self.rate(dtype), cost.bytes / self.device.ceiling("bandwidth").value)

    def rate(self, dtype: str = "") -> float:
        """FLOP/s; dtype: as `roofline` has it."""
        known = self.device.known("compute", dtype) if dtype else None
        return (known or self.device.ceiling("compute", self.dtype)).value

    def _work(self, node: NodeCost, workload: Workload) -> Prediction:
        found = None
        if node.scheme is not None:
            return self._packed(node, node.scheme, workload)
        if node.weight is not None:
            found = self._product(node)
            if node.cost.messages and found is not None:
                message = self._message(node)
                found = None if message is None else found + message
        elif node.cost.messages:
            found = self._message(node)
        elif node.cost.cached and not node.is_recurrent:
            found = self._attention(node.cost, workload, node.attends)
        elif node.is_mixture and self.quantized_times is not None and node.shape[0]:
            seconds = self.quantized_times.plain_experts(node.shape[0], node.cost.flops, node.cost.bytes)
            found = Prediction(seconds, ORIGINS[1])
        elif node.cost.bytes and self._knows(alike := _ALIKE.get(node.operation, node.operation), "traffic"):
            found = self.tables[alike].predict("traffic", self.dtype, (node.cost.bytes,))
        if found is not None:
            return found
        return Prediction(floor(node.cost, self.device, self.dtype, self.link).seconds, "analytic")

    def _product(self, node: NodeCost) -> Prediction | None:
        """By its own operation or by the product alone, whichever is surer; no less than the device holds for long."""
        assert node.weight is not None
        out, width = node.weight
        rows = math.prod(node.shape[:-1])
        tables = [self.tables[name] for name in (node.operation, _PLAIN) if self._knows(name, "product")]
        if rows == 0 or not tables:
            return None
        each = (table.predict("product", self.dtype, (rows, out, width)) for table in tables)
        found = min(each, key=lambda one: ORIGINS.index(one.origin))
        held = self.device.known("sustained", self.dtype)
        least = 0.0 if held is None else 2 * rows * out * width / held.value
        return found if found.seconds >= least else Prediction(least, max(found.origin, ORIGINS[1], key=ORIGINS.index))

    def in_fewer_bits(self, node: NodeCost, found: Prediction, cost: Cost, scheme: Scheme) -> Prediction:
        """A node by plain weights, which is `found` to take so long, with its weights packed, and so of `cost`."""
        seconds = self._by_packed(node, cost, scheme)
        if seconds is None and self.quantized_times is not None and scheme.values in self.quantized_times.values:
            itemsize = getattr(torch, self.dtype).itemsize
            more = self.quantized_times.expanded(node.cost.weights / itemsize, cost.weights, itemsize)
            seconds = found.seconds + more
        if seconds is None:
            seconds = self._by_roofline(found, node.cost, cost, multiplied_in(scheme))
        return Prediction(seconds, "analytic")

    def _by_roofline(self, found: Prediction, plain: Cost, cost: Cost, rounded: str) -> float:
        """As far above its roofline as by plain weights, and no faster than packed ones are read."""
        before = self.roofline(plain)
        seconds = found.seconds * self.roofline(cost, rounded) / before if before else found.seconds
        weights = plain.weights // getattr(torch, self.dtype).itemsize
        least: float = weights * _PACKED_BYTES / self.device.ceiling("bandwidth").value
        return max(seconds, least)

    def _by_packed(self, node: NodeCost, cost: Cost, scheme: Scheme) -> float | None:
        """Seconds of a product or of experts; None where they were not measured, or the weight becomes floats."""
        if self.quantized_times is None:
            return None
        if node.weight is not None:
            rows = math.prod(node.shape[:-1])
            return self.quantized_times.product(scheme, rows, node.weight, cost.weights, cost.written)
        if not node.is_mixture:
            return None
        weights = node.cost.weights / getattr(torch, self.dtype).itemsize
        return self.quantized_times.experts(scheme, node.shape[0], weights, cost.flops, cost.weights)

    def _packed(self, node: NodeCost, scheme: Scheme, workload: Workload) -> Prediction:
        cost, itemsize = node.cost, getattr(torch, self.dtype).itemsize
        weights = int(cost.weights * itemsize / node.quantized_bytes)
        plain = replace(cost, read=cost.read - cost.weights + weights, weights=weights)
        without = replace(node, scheme=None, cost=plain)
        found = self.in_fewer_bits(without, self._work(without, workload), cost, scheme)
        if self.quantized_times is None or node.weight is None or _ROUNDS not in node.kernels:
            return found
        more = self.quantized_times.quantizing(math.prod(node.shape[:-1]), node.weight[1], itemsize)
        return replace(found, seconds=found.seconds + more)

    def _message(self, node: NodeCost) -> Prediction | None:
        """Sums by their algorithm, with the norm that is behind them, and what is gathered in one shot as a sum in one;
        all else as NCCL's of as many bytes."""
        if self.sums is None:
            return None
        if node.operation not in _SUMS:
            found = None
            if _GATHERS in node.kernels:
                found = self.sums.predict("one shot", node.cost.sent // (self.ranks - 1), self.ranks)
            return found or self.sums.sent(node.cost.sent)
        nbytes = math.prod(node.shape) * getattr(torch, self.dtype).itemsize
        algorithm = next((_ALGORITHMS[kernel] for kernel in node.kernels if kernel in _ALGORITHMS), "nccl")
        found = self.sums.predict(algorithm, nbytes, self.ranks)
        if found is None or node.operation not in _NORMED or algorithm.endswith("norm"):
            return found
        moved = 4 * nbytes  # the norm behind it reads the sum and the residual, and writes two of their size
        if self._knows(_NORM, "traffic"):
            return found + self.tables[_NORM].predict("traffic", self.dtype, (moved,))
        return found + Prediction(floor(Cost(read=moved), self.device, self.dtype).seconds, "analytic")

    def _attention(self, cost: Cost, workload: Workload, attends: Attends | None) -> Prediction | None:
        """By the programs of its kernels; else of sequences with a token each by their number and the bytes of their
        keys, of prompts by FLOPs."""
        if self.attention_times is not None and attends is not None and workload.tokens:
            seconds = self.attention_times.seconds(cost, workload, attends)
            if seconds is not None:
                return Prediction(seconds, ORIGINS[1])
        decodes = [total for new, total in zip(workload.new, workload.total, strict=True) if new == 1]
        keys, known = sum(workload.total), self._knows(_DECODES, "decode")
        if not workload.tokens or cost.cached < keys or (decodes and not known):
            return None
        if len(decodes) == len(workload.new):
            return self._decodes(cost, len(decodes))
        if self.prompts is None:
            return None
        own = Cost(
            cost.flops * sum(decodes) // max(1, _pairs(workload)), cached=cost.cached * sum(decodes) // max(1, keys)
        )
        found = self.prompts.predict(cost.flops - own.flops)
        return found + self._decodes(own, len(decodes)) if decodes else found

    def _decodes(self, cost: Cost, sequences: int) -> Prediction:
        """See `decode_cost`."""
        shared = round(cost.flops * getattr(torch, self.dtype).itemsize / (2 * cost.cached))
        shape = (sequences, max(1, shared), cost.cached // sequences)
        return self.tables[_DECODES].predict("decode", self.dtype, shape)

    def _knows(self, operation: str, kind: str) -> bool:
        """Whether such calls of an operation were measured."""
        return operation in self.tables and (kind, self.dtype) in self.tables[operation].columns

    def _as_sure(self, found: Prediction) -> Prediction:
        return replace(found, origin=max(found.origin, self.surest, key=ORIGINS.index))

    def _seconds(self, quantity: str) -> float:
        """Of what was measured of the device; nothing where it was not."""
        known = self.device.known(quantity)
        return 0.0 if known is None else known.value


def _end(nodes: Iterable[NodeCost], seconds: Iterable[float]) -> float:
    """When the last node ends: sums travel one after another from where they begin to where they are waited for, and
    hide as much of their time as was measured at most: what they take of the device slows products down.
    """
    now = sent = alone = travelled = 0.0
    under_way: deque[float] = deque()
    for node, length in zip(nodes, seconds, strict=True):
        alone += length
        if node.operation == "start_all_reduce":
            travelled += length
            sent = max(now, sent) + length
            under_way.append(sent)
            continue
        if node.operation.startswith("finish_") and under_way:
            now = max(now, under_way.popleft())
        now += length
    return max(now, sent, alone - HIDDEN * travelled)


def _pairs(workload: Workload) -> int:
    """Of a query and a key that it sees."""
    return sum(
        new * (total - new) + new * (new + 1) // 2 for new, total in zip(workload.new, workload.total, strict=True)
    )


def _at_least(found: Prediction, seconds: float) -> Prediction:
    return found if found.seconds >= seconds else Prediction(seconds, "analytic")
