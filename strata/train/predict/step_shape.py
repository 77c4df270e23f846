"""A step as sizes alone: the model, the tokens of a rank, the layout, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from strata.models.config import ModelConfig
from strata.parallel.layout import Layout
from strata.parallel.schedules import PipelineSchedule, make_schedule
from strata.train.config import RECOMPUTE, RECOMPUTE_OF_MODULES
from strata.train.predict.layer_costs import LayerCost, layer_costs
from strata.train.predict.rank_parameters import RankParameters, parameters_by_rank


@dataclass(frozen=True)
class TrainShape:
    """A step of training. tokens: of a batch (that the ranks of cp share out), in sequences of at most `length`.

    batches: of a rank in a step, whose gradients add up; with a pipeline its micro-batches. precision: of the layers'
    products, one of `strata.train.config.PRECISIONS`. layout: checked for the model. offload: masters and moments lie
    on the host. sums_cross_entropy: see `strata.parallel.loss.Loss`. adapters: they alone learn, beside the modules.
    """

    config: ModelConfig
    tokens: int
    length: int
    batches: int = 1
    precision: str = "bf16"
    layout: Layout = field(default_factory=Layout)
    offload: bool = False
    sums_cross_entropy: bool = True
    adapters: bool = False

    @property
    def local_tokens(self) -> int:
        """Of a batch, on one rank of cp."""
        return -(-self.tokens // self.layout.cp)

    @property
    def between(self) -> int:
        """Ranks that divide by tokens what lies between the matrices."""
        return self.layout.tp if self.layout.sequence_parallel else 1

    @property
    def runs_graph(self) -> bool:
        """Whether the merged and fused graph trains (`strata.train.compile`), or the modules of a divided model."""
        return self.layout.divides_documents_only and not self.adapters

    @property
    def loss_has_gradients(self) -> bool:
        """Whether the loss and its gradients are computed at once, which takes two products less one with the head."""
        return self.sums_cross_entropy and (self.runs_graph or self.layout.pp == self.layout.tp == 1)

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

    def updated(self, held: RankParameters) -> int:
        """The parameters whose optimizer state a rank has, and that it updates."""
        dense, experts = self.data_ranks
        return -(-held.dense // dense) + -(-held.experts // experts)

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """Of the pipeline, with no more micro-batches than it takes to go on alike; without one, of a single rank."""
        return make_schedule(self.schedule_name, self.layout.pp, 1 if self.layout.pp == 1 else self.alike_from(4))

    @property
    def schedule_name(self) -> str:
        """Of the pipeline; of a single rank the plainest."""
        return "1f1b" if self.layout.pp == 1 else self.layout.schedule

    def alike_from(self, rounds: int) -> int:
        """The micro-batches of a schedule that has at most so many for each rank and shares out as `batches` do."""
        ranks = self.layout.pp
        return min(self.batches, rounds * ranks + self.batches % ranks)

    @cached_property
    def layer_costs(self) -> tuple[LayerCost, ...]:
        """Of each layer of the whole model, with full sequences."""
        return layer_costs(self.config, self.length, fused=self.runs_graph)

    @cached_property
    def local_parameters(self) -> tuple[RankParameters, ...]:
        """Of each rank of the pipeline."""
        return parameters_by_rank(self.config, self.layout.tp, self.layout.ep, self.length, self.schedule.rank_of_stage)
