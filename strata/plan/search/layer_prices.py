"""What steps of a model take, from graphs of a few of its layers: layers of one kind take equally long.

The graphs of 80 layers take seconds to make and 0.3 s a step to price; two of them, and one more, give the same times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from strata.comm.symmetric import imagined
from strata.cost.nodes import NodeCost
from strata.cost.step_model import StepModel, StepNodes
from strata.engine.program.meta_model import MetaModel
from strata.engine.ranks.prefill_context_parallel import CONTEXT_AXIS
from strata.hardware.prediction import ORIGINS, Prediction
from strata.hardware.roofline import Floor, Workload
from strata.kernels.quant.quantized import multiplied_in
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.models.weights import weight_bytes
from strata.parallel.serving_shard import TENSOR_AXIS, RankShard
from strata.plan.meta_model import meta_model
from strata.plan.search.layout import ServingLayout
from strata.plan.search.machine import Machine
from strata.plan.search.precision import AS_CHECKPOINT, Precision

# Steps of so many sequences are priced as captured ones: `strata serve --max-num-seqs` records as many as it is given.
MAX_SEQUENCES = 1024

_Kind = tuple[Any, ...]


class StepPrice(NamedTuple):
    """A step, in seconds: on the device by the origin of its prediction, and until the host has launched it, 0 if it is
    replayed. messages: part of the device's. compute, memory, communication: the bounds of the roofline, of all layers.
    """

    measured: float
    interpolated: float
    analytic: float
    around: float
    launches: float
    messages: float
    compute: float
    memory: float
    communication: float

    @property
    def seconds(self) -> float:
        return max(self.on_device, self.launches)

    @property
    def on_device(self) -> float:
        return self.measured + self.interpolated + self.analytic + self.around

    @property
    def origins(self) -> dict[str, float]:
        return dict(zip(ORIGINS, self, strict=False))

    @property
    def bounds(self) -> Floor:
        return Floor(self.compute, self.memory, self.communication)

    @staticmethod
    def total(counted: Iterable[tuple[float, StepPrice]]) -> StepPrice:
        """So many of each, one after another; a negative number is taken away."""
        scaled = ([count * value for value in price] for count, price in counted)
        return StepPrice(*map(sum, zip(*scaled, strict=True)))


class LayerPrices:
    """Prices steps of one rank of a layout, of a model in `dtype`; of several stages, of all of them together, without
    what they send each other."""

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine,
        layout: ServingLayout,
        dtype: torch.dtype,
        precision: Precision = AS_CHECKPOINT,
    ) -> None:
        """precision: of the graphs, by whose products others follow.
        Raises ValueError if the ranks of the layout cannot share the model, or their link is not known."""
        self.machine, self._dtype, self._precision = machine, dtype, precision
        self._whole = layout if layout.stages == 1 else replace(layout, stages=1)
        kinds = config.layer_kinds
        base = representatives(kinds)
        self._alike: dict[tuple[int, torch.dtype | None], MetaModel] = {}
        held = Counter(kinds[layer] for layer in base)
        self._parts: list[tuple[MetaModel, dict[_Kind, int]]] = [(self._model(config, base), {})]
        ranks = self._whole.ranks
        evidence, link = machine.evidence_of(ranks), machine.link(ranks)
        self.predictor = StepModel(self._parts[0][0], machine.listed, evidence=evidence, link=link).predictor
        self._bandwidth = self.predictor.device.ceiling("bandwidth").value
        self._missing = {kind: count - held[kind] for kind, count in Counter(kinds).items() if count > held[kind]}
        for kind in self._missing:
            layer = kinds.index(kind)
            at = base.index(layer) + 1
            self._parts.append((self._model(config, [*base[:at], layer, *base[at:]]), {kind: 1}))

    @property
    def itemsize(self) -> int:
        """Bytes of an element of hidden states."""
        return self._dtype.itemsize

    @cached_property
    def costs(self) -> list[tuple[MetaModel, int]]:
        """The models of few layers, and how many times each counts: their costs add up to those of the whole model."""
        more = list(self._missing.values())
        extended = ((part[0], count) for part, count in zip(self._parts[1:], more, strict=True))
        return [(self._parts[0][0], 1 - sum(more)), *extended]

    def price(self, workload: Workload) -> StepPrice:
        """A step that samples a row of each sequence, those of one token first; in the graphs' precision."""
        return self.prices(workload, [self._precision])[0]

    def prices(self, workload: Workload, precisions: list[Precision]) -> list[StepPrice]:
        """The same step in several precisions."""
        each = [[(count, price) for price in self._of(model, workload, precisions)] for model, count in self.costs]
        return [StepPrice.total(counted) for counted in zip(*each, strict=True)]

    def _of(self, model: MetaModel, workload: Workload, precisions: list[Precision]) -> list[StepPrice]:
        found: dict[Precision, StepPrice] = {}
        for rounded in {precision.kv_dtype for precision in precisions}:
            step = self._with_pages(model, rounded).step(workload)
            alike = [precision for precision in precisions if precision.kv_dtype == rounded]
            found |= dict(zip(alike, self._of_step(step, workload, alike), strict=True))
        return [found[precision] for precision in precisions]

    def _with_pages(self, model: MetaModel, rounded: torch.dtype | None) -> MetaModel:
        """The same graphs over pages in 8 bits, or in the model's dtype."""
        key = id(model), rounded
        if key not in self._alike:
            self._alike[key] = model if model.sizes.pool.quantized == rounded else model.over_pages(rounded)
        return self._alike[key]

    def _of_step(self, step: StepNodes, workload: Workload, precisions: list[Precision]) -> list[StepPrice]:
        predictor = self.predictor
        each = [predictor.node(node, workload) for node in step.timed]
        around = predictor.together(step.timed, each, captured=True).seconds - sum(one.seconds for one in each)
        launches = 0.0 if step.captured or not self.machine.runs else predictor.launches(len(step.timed))
        pairs = list(zip(step.timed, each, strict=True))
        return [self._in(precision, pairs, around, launches) for precision in precisions]

    def _in(
        self, precision: Precision, pairs: list[tuple[NodeCost, Prediction]], around: float, launches: float
    ) -> StepPrice:
        """The same step in a precision of weights: see `StepPredictor.in_fewer_bits`."""
        packs = precision.stored is not None or precision.quantization != self._precision.quantization
        origins, messages = dict.fromkeys(ORIGINS, 0.0), 0.0
        compute = memory = communication = 0.0
        for node, found in pairs:
            cost, rounded = node.cost, node.activation_kind
            if packs and (packed := precision.cost(node, self.itemsize)) is not cost:
                assert precision.scheme is not None
                cost, rounded = packed, multiplied_in(precision.scheme)
                found = self.predictor.in_fewer_bits(node, found, cost, precision.scheme)
            origins[found.origin] += found.seconds
            messages += found.seconds if cost.messages else 0.0
            compute += cost.flops / self.predictor.rate(rounded)
            memory += (cost.weights + cost.cached) / self._bandwidth
            if self.predictor.link is not None:
                communication += self.predictor.link.min_seconds(cost.messages, cost.sent)
        measured, interpolated, analytic = (origins[origin] for origin in ORIGINS)
        device = measured, interpolated, analytic, around
        return StepPrice(*device, launches, messages, compute, memory, communication)

    def _model(self, config: ModelConfig, layers: list[int]) -> MetaModel:
        layout, own = self._whole, config.with_layers(layers)
        shard = shard_of(own, layout)
        context = imagined(CONTEXT_AXIS, layout.context) if layout.context > 1 else None
        made = meta_model(
            own,
            self.machine.kernels,
            self._dtype,
            shard=shard,
            context=context,
            quantization=self._precision.quantization,
            kv_cache_dtype=self._precision.kv_cache_dtype,
        )
        # Which steps are captured follows from the size of the model as it is.
        whole = shard_of(config, layout)
        with torch.device("meta"):
            parameters = weight_bytes(build(config if whole is None else whole.divided), self._dtype)
        return made.of_sizes(parameters=parameters // self._dtype.itemsize, max_sequences=MAX_SEQUENCES)


def shard_of(config: ModelConfig, layout: ServingLayout, place: int = 0) -> RankShard | None:
    """Of the rank in that place of those that divide matrices, with all layers; None if there is one."""
    if layout.tensor == 1:
        return None
    axis = imagined(TENSOR_AXIS, layout.tensor)
    by = {"expert_parallel": layout.expert_parallel, "attention_dp": layout.attention_dp}
    return RankShard.of(config, layout.tensor, place, axis, **by)


def representatives(kinds: list[_Kind]) -> list[int]:
    """Layers of all kinds, with the first and the last of the model."""
    found = {kinds.index(kind) for kind in kinds} | {0, len(kinds) - 1}
    return sorted(found)
