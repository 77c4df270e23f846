"""A step as sizes alone: the model, the tokens of a rank, the layout; and which parameters each rank then holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from strata.comm.placement import Placement
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.parallel.families import TABLES, placements
from strata.parallel.layout import Layout
from strata.parallel.schedules import PipelineSchedule, make_schedule
from strata.parallel.stages import layer_spans
from strata.train.config import RECOMPUTE
from strata.train.predict.layer_costs import LayerCost, layer_costs
from strata.train.recompute import RECOMPUTE_OF_MODULES


@dataclass(frozen=True)
class RankParameters:
    """What a rank of a pipeline holds, in elements, after tp and ep have divided it; ZeRO not yet.

    layers: the numbers of those of its stages. in_layers: their parameters. dense: all outside experts, embedding and
    head among them. experts: of the experts. embedding, head: 0 where they lie on another rank; a tied embedding is the
    head of the last rank too, which computes with it, but a parameter of the first alone.
    """

    layers: tuple[int, ...]
    in_layers: int
    dense: int
    experts: int
    embedding: int
    head: int

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def mean_layer(self) -> int:
        """The parameters of one layer."""
        return self.in_layers // len(self.layers)


@dataclass(frozen=True)
class StepShape:
    """A step of training. tokens: of a batch (that the ranks of cp share out), in sequences of at most `length`.

    batches: of a rank in a step, whose gradients add up; with a pipeline its micro-batches. precision: of the layers'
    products, one of `strata.train.config.PRECISIONS`. layout: checked for the model.
    """

    config: ModelConfig
    tokens: int
    length: int
    batches: int = 1
    precision: str = "bf16"
    layout: Layout = field(default_factory=Layout)

    @property
    def own_tokens(self) -> int:
        """Of a batch, on one rank of cp."""
        return -(-self.tokens // self.layout.cp)

    @property
    def between(self) -> int:
        """Ranks that divide by tokens what lies between the matrices."""
        return self.layout.tp if self.layout.sequence_parallel else 1

    @property
    def runs_graph(self) -> bool:
        """Whether the merged and fused graph trains (`strata.train.compile`), or the modules of a divided model."""
        return self.layout.divides_documents_only

    @property
    def loss_has_gradients(self) -> bool:
        """Whether the loss and its gradients are computed at once, which takes two products less one with the head."""
        return self.runs_graph or self.layout.pp == self.layout.tp == 1

    @property
    def recomputes(self) -> tuple[str, ...]:
        """The ways to recompute that a layout has, from least time to least memory."""
        if self.runs_graph:
            return RECOMPUTE
        split = self.layout.pp > 1 and self.layout.schedule.startswith("zero-bubble")
        return ("none",) if split else RECOMPUTE_OF_MODULES

    @property
    def ranks_of_token(self) -> float:
        """How many ranks of ep have experts of a token, on average, if all choices are equally likely."""
        experts, ranks = self.config.experts, self.layout.ep
        if experts is None:
            return 0.0
        elsewhere = math.comb(experts.count - experts.count // ranks, experts.per_token)
        return ranks * (1 - elsewhere / math.comb(experts.count, experts.per_token))

    @property
    def data_ranks(self) -> tuple[int, int]:
        """Over how many ranks ZeRO divides what is outside experts, and what is in them."""
        layout = self.layout
        divided = layout.shard * layout.cp if layout.zero else 1
        return divided, (divided // layout.ep if layout.zero else 1)

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """Of the pipeline; without one, of a single rank."""
        return make_schedule(self.layout.schedule if self.layout.pp > 1 else "1f1b", self.layout.pp, self.batches)

    @cached_property
    def layer_costs(self) -> tuple[LayerCost, ...]:
        """Of each layer of the whole model, with full sequences."""
        return layer_costs(self.config, self.length, fused=self.runs_graph)

    @cached_property
    def held(self) -> tuple[RankParameters, ...]:
        """Of each rank of the pipeline."""
        with torch.device("meta"):
            model = build(self.config)
        stages = self.schedule.stages
        spans = layer_spans(model, stages, self.length) if stages > 1 else [(0, self.config.num_layers)]
        elements = dict(self._elements(model))
        tied_head = elements["model.embed_tokens.weight"] if self.config.tied else 0
        found = []
        for rank in range(self.schedule.ranks):
            own = self.schedule.stages_of(rank)
            layers = tuple(layer for stage in own for layer in range(*spans[stage]))
            prefixes = [f"model.layers.{layer}." for layer in layers]
            if 0 in own:
                prefixes.append("model.embed_tokens.")
            if stages - 1 in own:
                prefixes += ["model.norm.", "lm_head."]
            names = [name for name in elements if name.startswith(tuple(prefixes))]
            experts = sum(elements[name] for name in names if ".mlp.experts." in name)
            ends = [elements.get(f"{end}.weight", 0) for end in ("model.embed_tokens", "lm_head")]
            found.append(
                RankParameters(
                    layers,
                    sum(elements[name] for name in names if name.startswith("model.layers.")),
                    sum(elements[name] for name in names) - experts,
                    experts,
                    ends[0] if 0 in own else 0,
                    (ends[1] or tied_head) if stages - 1 in own else 0,
                )
            )
        return tuple(found)

    def _elements(self, model: nn.Module) -> Iterator[tuple[str, int]]:
        """Of each parameter, the most that a rank of tp and ep holds."""
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        placed = placements(shapes, TABLES[self.config.architecture])
        for name, shape in shapes.items():
            dim = placed[name].divided_dim
            parts = self.layout.tp
            if placed[name] is Placement.EXPERT:
                dim, parts = 0, self.layout.ep
            if dim is None:
                yield name, shape.numel()
            else:
                yield name, shape.numel() // shape[dim] * -(-shape[dim] // parts)
