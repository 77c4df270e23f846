"""A model as it was traced, and the passes over it that the variants of a step program share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from strata.comm.mesh import Axis
from strata.comm.operations import Along
from strata.engine.engine_config import EngineConfig
from strata.engine.ranks.prefill_context_parallel import CONTEXT_AXIS
from strata.engine.ranks.vocabulary_shard import VocabularyShard
from strata.graph.bind import NO_AXES, bind
from strata.graph.compose import compose, copied
from strata.graph.fold import Folded, fold
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.fuse_rounding import fuse_rounding
from strata.graph.gather import gather_after_attention
from strata.graph.merge import merge
from strata.graph.mixtures import count_experts, leave_out_padding
from strata.graph.passes import passes_of
from strata.graph.quantize import quantize
from strata.graph.ranks.fuse_messages import fuse_messages
from strata.graph.ranks.hierarchical_sums import ACROSS_AXIS, INSIDE_AXIS, hierarchical_sums
from strata.graph.ranks.shard import shard as shard_graph
from strata.graph.ranks.shard_keys import KeySharding, shard_keys
from strata.graph.ranks.slice_products import slice_products
from strata.graph.ranks.stages import exchange, take_rows, trace_stage
from strata.graph.sparsify_attention import select_pages, sparsify_attention
from strata.graph.trace import trace, trace_head
from strata.graph.walk import operation_counts
from strata.hardware.figures import Device
from strata.kernels import tuned
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.kernels.choose import MEASURED, Thresholds, thresholds_of
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear.quantized.in_8_bits import multiplies_quantized_rows
from strata.kernels.quant.quantized import QuantizedWeight
from strata.models.families import build
from strata.parallel.serving_shard import KEYS_AXIS, PIPELINE_AXIS, TENSOR_AXIS, RankShard

Pass = Callable[[fx.GraphModule], fx.GraphModule]


class MovingExperts(NamedTuple):
    """Of a rank whose experts may move.

    turns: [layers, experts, period] int32, where choices go (see `shard`). totals: [layers, experts] int64, to which
    the choices of steps are added, if the rank counts.
    """

    turns: Tensor
    totals: Tensor
    counts: bool = True


@dataclass(frozen=True)
class Target:
    """What the graphs of one rank are for, beside what its engine is asked for.

    kind: of the device, see `Operation.bind`. limits: of a CUDA device, which need not be here, so that products may
    read rows that are rounded already; its table of measured kernels is read. copies: the device, if ranks send large
    messages by its copy engines. shard: of the rank whose model it is, where several share one. experts: where its
    experts may move. context: along which ranks divide the tokens of steps. packed: what products read instead of these
    parameters, which may be without memory. sparse: to which blocks of keys long prompts attend, or to which pages
    decodes do; None: all attend to all.
    """

    kind: str
    limits: DeviceLimits | None = None
    copies: Device | None = None
    shard: RankShard | None = None
    experts: MovingExperts | None = None
    context: Axis | Along | None = None
    packed: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    sparse: BlockChoice | PageChoice | None = None

    @cached_property
    def table(self) -> tuned.Table:
        return {} if self.limits is None else tuned.read(self.limits.product)

    @cached_property
    def thresholds(self) -> Thresholds:
        return thresholds_of(MEASURED if self.limits is None else self.limits.product)


@dataclass(frozen=True)
class StepSource:
    """What the graphs of a step program are made of: copies of it are rewritten by passes.

    body: Batch to hidden [tokens, hidden]; head: hidden to logits, None of a stage before the last. undivided: the body
    before `division` of keys among ranks, None where there is none. asked, target: what it was made for. passes: the
    names of those that run. operations: how many nodes of each operation it had as it was traced. folded: weights
    that were computed from others.
    """

    body: fx.GraphModule
    head: fx.GraphModule | None
    undivided: fx.GraphModule
    division: KeySharding | None
    asked: EngineConfig
    target: Target
    passes: frozenset[str]
    dtype: torch.dtype
    operations: Counter[str]
    folded: tuple[Folded, ...]

    @staticmethod
    def of(model: nn.Module, asked: EngineConfig, target: Target) -> StepSource:
        """A rank of one sums as ranks do in deterministic mode."""
        shard, dtype = target.shard, next(model.parameters()).dtype
        body, head = _traced(model, shard)
        operations = operation_counts(body)
        if head is not None:
            operations += operation_counts(head)
        if shard is not None:
            body = _of_rank(body, shard, target.experts, asked.deterministic)
            head = None if head is None else _of_rank(head, shard, target.experts, asked.deterministic)
        passes = passes_of(asked.passes)
        if asked.executor == "compile":
            passes &= {"merge"}
        folded: list[Folded] = []
        for graph in (body, head):
            if graph is not None:
                folded += fold(quantize(graph, target.packed), passes)
        if isinstance(target.sparse, PageChoice):
            select_pages(body, target.sparse)
        undivided, division = body, None
        if shard is not None and shard.kept.ranks > 1:
            value = 0 if shard.config.latent is None else shard.config.latent.value
            division = KeySharding(Along(KEYS_AXIS, shard.kept.ranks), shard.kept, dtype, value)
            body = shard_keys(copied(undivided), division)
        return StepSource(body, head, undivided, division, asked, target, passes, dtype, operations, tuple(folded))

    @property
    def by_rows(self) -> bool:
        """Whether passes pay that look at the number of rows: there are implementations for them on CUDA alone, and not
        in deterministic mode."""
        return self.target.kind == "cuda" and not self.asked.deterministic and self.asked.executor == "graph"

    @property
    def vocabulary(self) -> VocabularyShard | None:
        """The ids of which the logits are, where ranks divide the vocabulary; None: of all."""
        shard = self.target.shard
        return None if shard is None or shard.attention_dp or _has_all_columns(shard) else VocabularyShard.of(shard)

    @cached_property
    def _multiplies(self) -> Callable[[QuantizedWeight], bool] | None:
        """Whether a product reads rounded rows; None where none does."""
        limits = self.target.limits
        if limits is None or not self.by_rows or fuse_rounding.__name__ not in self.passes:
            return None
        multiplies = partial(multiplies_quantized_rows, dtype=self.dtype, limits=limits)
        return multiplies if any(map(multiplies, self.target.packed.values())) else None

    @property
    def rounds(self) -> bool:
        """Whether what is in front of a product rounds its rows, in steps of many."""
        return self._multiplies is not None

    def logits(
        self, *, counted: bool = True, choice: BlockChoice | None = None, body: fx.GraphModule | None = None
    ) -> fx.GraphModule:
        """Batch to the logits of all tokens, or of a stage before the last to hidden, merged and fused. counted: with
        the choices of experts, where they are. choice: which keys prompts attend to. body: in place of its own."""
        body, target = body or self.body, self.target
        graph = copied(body) if self.head is None else compose(body, self.head)
        if choice is not None:
            sparsify_attention(graph, choice)
        if target.shard is not None and target.shard.attention_dp:
            leave_out_padding(graph, Along(TENSOR_AXIS, target.shard.size))
        if counted and target.experts is not None and target.experts.counts:
            count_experts(graph, target.experts.totals)
        return fuse(self.run(merge, graph), self.passes)

    def logits_of_rows(self, **which: Any) -> fx.GraphModule:
        """Batch and rows [rows] int32 to the logits of these tokens, in any step; as `logits`."""
        graph = self.logits(**which)
        return self.of_rows(self.run(fuse_gated_products, graph) if self.by_rows else graph)

    def hidden(self, body: fx.GraphModule | None = None) -> fx.GraphModule:
        """Batch to hidden [tokens, hidden], merged, fused and bound. body: in place of its own."""
        return self.bound(fuse(self.run(merge, copied(body or self.body)), self.passes))

    def run(self, one: Pass, graph: fx.GraphModule) -> fx.GraphModule:
        """A pass, if it is one of those that run."""
        return one(graph) if one.__name__ in self.passes else graph

    def of_rows(self, graph: fx.GraphModule) -> fx.GraphModule:
        return take_rows(graph) if self.head is None else gather_after_attention(graph)

    def with_messages(self, graph: fx.GraphModule) -> fx.GraphModule:
        fuses = self.by_rows and self.target.shard is not None and self.asked.all_reduce_group_size == 1
        return self.run(fuse_messages, graph) if fuses else graph

    def with_rounding(self, graph: fx.GraphModule) -> fx.GraphModule:
        return graph if self._multiplies is None else fuse_rounding(graph, self.dtype, self._multiplies)

    def with_levels(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Sums over ranks in groups first, where that is asked for."""
        group = self.asked.all_reduce_group_size
        return graph if group == 1 else hierarchical_sums(graph, group, self.asked.tensor_parallel_size)

    def bound(self, graph: fx.GraphModule) -> fx.GraphModule:
        target, group = self.target, self.asked.all_reduce_group_size
        named = {INSIDE_AXIS: Along(INSIDE_AXIS, group)}
        named[ACROSS_AXIS] = Along(ACROSS_AXIS, self.asked.tensor_parallel_size // group)
        axes = {**named, **(NO_AXES if target.shard is None else target.shard.axes)}
        if target.context is not None:
            axes[CONTEXT_AXIS] = target.context
        return bind(self.with_levels(graph), target.kind, self.asked.deterministic, axes)


def _of_rank(
    graph: fx.GraphModule, shard: RankShard, experts: MovingExperts | None, deterministic: bool
) -> fx.GraphModule:
    if _has_all_columns(shard):
        return graph
    along, turns = Along(TENSOR_AXIS, shard.size), None if experts is None else experts.turns
    shard_graph(graph, shard.placements, along, shard.index, shard.slots, turns, attention_dp=shard.attention_dp)
    return slice_products(graph, shard.placements, shard.size) if deterministic else graph


def _traced(model: nn.Module, shard: RankShard | None) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """A model and its head; of several stages what one of them has, with its messages."""
    if shard is None or shard.stages == 1:
        return trace(model), trace_head(model)
    with torch.device("meta"):
        whole = build(shard.divided)
    own, head = trace_stage(whole, *shard.layers, model)
    dtype = next(model.parameters()).dtype
    return exchange(own, Along(PIPELINE_AXIS, shard.stages), shard.stage, shard.whole.hidden_size, dtype), head


def _has_all_columns(shard: RankShard) -> bool:
    """Of a stage of one rank, which computes its layers as one rank alone would."""
    return shard.stages > 1 and shard.size == 1
