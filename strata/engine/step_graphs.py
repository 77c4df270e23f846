"""The graphs of one model that the steps of an engine run: each kind of step has the one that suits it.

They are also what a step is costed and drawn by (`strata.plan.meta_model`), of a model on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from strata.comm.mesh import Axis
from strata.comm.operations import Along
from strata.engine.ranks.key_gathers import KeyGathers
from strata.engine.ranks.token_division import CONTEXT_AXIS
from strata.engine.ranks.vocabulary_part import VocabularyPart
from strata.engine.steps.inputs import DividedInputsOfStep, DrawOfStep, InputsOfStep
from strata.graph.bind import NO_AXES, bind
from strata.graph.capture import capture, capture_head
from strata.graph.compile import compiled
from strata.graph.compose import compose, copied
from strata.graph.cost import operation_counts
from strata.graph.count_experts import count_experts
from strata.graph.fuse import fuse, fuse_gated_products
from strata.graph.fuse_attention import fuse_decode_attention
from strata.graph.fuse_products import fuse_products
from strata.graph.fuse_rounding import fuse_rounding
from strata.graph.gather import gather_after_attention
from strata.graph.leave_out_padding import leave_out_padding
from strata.graph.merge import merge
from strata.graph.passes import ALL_PASSES
from strata.graph.product_times import measured_seconds, products_of
from strata.graph.quantize import quantize
from strata.graph.ranks.divide_keys import KeyDivision, divide_keys, gather_keys
from strata.graph.ranks.divide_tokens import divide_tokens
from strata.graph.ranks.exchange_rows import exchange_rows
from strata.graph.ranks.fuse_messages import fuse_messages
from strata.graph.ranks.fuse_sent_products import fuse_sent_products
from strata.graph.ranks.narrow_messages import NARROW_TOKENS, narrow_messages
from strata.graph.ranks.overlap import overlap as overlap_messages
from strata.graph.ranks.overlap_rule import overlapping_tokens, row_division
from strata.graph.ranks.shard import shard as shard_graph
from strata.graph.ranks.slice_products import slice_products
from strata.graph.ranks.stages import capture_stage, exchange, take_rows
from strata.graph.sparsify_attention import select_pages, sparsify_attention
from strata.hardware.figures import Device
from strata.kernels import tuned
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.attention.sparse.page_choice import PageChoice
from strata.kernels.device_limits import DeviceLimits
from strata.kernels.linear.packed.few_rows import MOST_ROUNDED_ROWS
from strata.kernels.linear.packed.in_8_bits import multiplies_rounded
from strata.kernels.quant.packed import PackedWeight
from strata.models.families import build
from strata.parallel.serving_shard import KEYS_AXIS, PIPELINE_AXIS, TENSOR_AXIS, RankShard

# Up to so many rows, products that take up norms, gating and residuals were faster than the library's with kernels
# between them in whole steps of the 0.6B and the 8B shape on an H200; beyond, that depends on the weights.
_ALWAYS_FUSED_ROWS = 64
# And up to so many where no table tells.
_FUSED_ROWS = 128
# Fused products of 64 to 256 rows took 4 (8B) to 11 % (0.6B) longer in layers than alone, the library's 0 to 4 %.
_FUSED_IN_LAYERS = 1.07


@dataclass(frozen=True)
class StepGraphs:
    """One model captured, rewritten by the passes, and bound for one kind of device. Steps call `forward` of a graph.

    hidden: Batch to hidden [tokens, hidden]; head: hidden [rows, hidden] to logits [rows, vocabulary].
    logits: Batch and rows [rows] int32 to the logits of these tokens alone; for any step.
    rounded_logits: the same for steps of so many tokens that products round them: what is in front of a product does.
        None where no product does.
    overlapped_logits: the same for steps of `overlap_tokens` or more, in which messages between ranks travel while
        products run; None where there is none. has_copies: by copy engines.
    sparse_hidden, sparse_logits: as `hidden` and `logits`, for steps that `leaves_out_keys` tells of; None where there
        are none. sparse_keys: from how many on a prompt attends to blocks of its keys.
    divided: the same of a step whose tokens ranks divide, see `divide_tokens`; None where none do.
    decode_small_batch, decode_large_batch: for batches in which every sequence has one new token, Batch to logits
        [tokens, vocabulary]; products of the first take up norms and gating. None where no steps are recorded.
    recorded_inputs, mixed_inputs, prompt_inputs: StepInputs to tokens and block tables: of recorded steps; of others in
        which ids are missing that only the device knows; and in which none are.
    divided_inputs, fresh_inputs: DivisionInputs to tokens, block tables and the prompts' division, of all steps in
        which cuDNN attends for them: over pages, whose ends are cleared; and over the step's own keys.
    draw, draw_filtered: DrawStep to ids [rows] int32, which are also written where later steps read them.
    part: the ids of which the logits are, where ranks divide the vocabulary; None: of all, [rows, vocabulary].
    captured: how many nodes of each operation the model and its head had before the passes.
    table: what was measured of the device's products.
    overlap_tokens: see `overlapped_logits`; 0 where there is none.
    gathered_hidden, gathered_logits: as `hidden` and `logits`, for steps for which ranks that divide keys gather them,
        if `key_gathers` tells that it pays; None where none do.
    whole_prompts: the same as `hidden` for prompts that stand whole in a batch without pages, where ranks divide keys
        by sequence; None: `hidden` is for them too.
    narrow_logits: the same as `logits` for steps of `NARROW_TOKENS` or more, in which sums over ranks travel in 8 bits;
        None where none do.
    exchanged_logits: the same for steps of `exchange_tokens` or more that are launched, in which rows go to the ranks
        of their experts alone (`exchange_rows`); None where all go to all.

    A stage before the last has no head and draws nothing; where others give logits, its graphs give the hidden states
    [tokens, hidden] that it hands on.
    """

    hidden: fx.GraphModule
    head: fx.GraphModule | None
    logits: fx.GraphModule
    rounded_logits: fx.GraphModule | None
    overlapped_logits: fx.GraphModule | None
    divided: fx.GraphModule | None
    sparse_hidden: fx.GraphModule | None
    sparse_logits: fx.GraphModule | None
    decode_small_batch: fx.GraphModule | None
    decode_large_batch: fx.GraphModule | None
    recorded_inputs: fx.GraphModule
    mixed_inputs: fx.GraphModule
    prompt_inputs: fx.GraphModule
    divided_inputs: fx.GraphModule
    fresh_inputs: fx.GraphModule
    draw: fx.GraphModule
    draw_filtered: fx.GraphModule
    part: VocabularyPart | None
    captured: Mapping[str, int]
    table: tuned.Table
    sparse_keys: int
    overlap_tokens: int
    has_copies: bool
    narrow_logits: fx.GraphModule | None = None
    exchanged_logits: fx.GraphModule | None = None
    exchange_tokens: int = 0
    whole_prompts: fx.GraphModule | None = None
    gathered_hidden: fx.GraphModule | None = None
    gathered_logits: fx.GraphModule | None = None
    key_gathers: KeyGathers | None = None

    @property
    def hidden_without_pages(self) -> fx.GraphModule:
        """Batch to hidden [tokens, hidden], of prompts that stand whole in it."""
        return self.whole_prompts or self.hidden

    def launched_logits_of(self, tokens: int) -> fx.GraphModule:
        """The graph for steps of so many tokens, on each rank, that the host launches kernel by kernel."""
        if self.exchanged_logits is not None and tokens >= self.exchange_tokens:
            return self.exchanged_logits
        return self.logits_of(tokens)

    def logits_of(self, tokens: int) -> fx.GraphModule:
        """The graph for steps with prompts, and others that are not recorded, of so many tokens."""
        if self.narrow_logits is not None and tokens >= NARROW_TOKENS:
            return self.narrow_logits
        if self.overlapped_logits is not None and tokens >= self.overlap_tokens:
            return self.overlapped_logits
        rounded = self.rounded_logits
        return self.logits if rounded is None or tokens <= MOST_ROUNDED_ROWS else rounded

    def leaves_out_keys(self, counts: NDArray[Any], ends: NDArray[Any]) -> bool:
        """Whether prompts of a step attend to blocks of their keys: it runs so many tokens of sequences that have so
        many then, [sequences] each."""
        return self.sparse_logits is not None and bool(((counts > 1) & (ends >= self.sparse_keys)).any())

    def of_step(self, counts: NDArray[Any], ends: NDArray[Any], page_tokens: int) -> StepGraphs:
        """With the graphs for such a step in place of `hidden` and `logits`. page_tokens: see `PoolShape`."""
        hidden, logits = self.sparse_hidden, self.sparse_logits
        if self.key_gathers is not None and self.key_gathers.pays(counts, ends, page_tokens):
            hidden, logits = self.gathered_hidden, self.gathered_logits
        elif not self.leaves_out_keys(counts, ends):
            return self
        assert hidden is not None
        assert logits is not None
        given = replace(self, hidden=hidden, logits=logits, rounded_logits=None, overlapped_logits=None)
        return replace(given, narrow_logits=None, exchanged_logits=None)

    def decode(self, sequences: int) -> fx.GraphModule | None:
        """The graph for decode steps of so many sequences, the faster by the table; None where none are recorded."""
        small, large = self.decode_small_batch, self.decode_large_batch
        if small is None or large is None:
            return None
        if self.rounded_logits is not None and sequences > MOST_ROUNDED_ROWS:
            return large  # products that take up norms do not round their rows
        if sequences <= _ALWAYS_FUSED_ROWS:
            return small
        fused, apart = (measured_seconds(products_of(graph), sequences, self.table) for graph in (small, large))
        is_fused = sequences <= _FUSED_ROWS if fused is None or apart is None else fused * _FUSED_IN_LAYERS <= apart
        return small if is_fused else large


class Overlap(NamedTuple):
    """Where messages between ranks may travel while products run. tokens: in steps of so many or more; None: of as many
    as make it pay by `overlapping_tokens` on the device, whose copy engines send them, or in none without one; 0: in
    none."""

    tokens: int | None = 0
    device: Device | None = None

    def least_tokens(self, graph: fx.GraphModule) -> int | None:
        """Of the steps in which they do, None: of none. graph: of any step, before messages are fused."""
        if self.tokens is None:
            return overlapping_tokens(graph, self.device)
        return self.tokens or None

    def apply(self, graph: fx.GraphModule) -> fx.GraphModule:
        """`overlap` of the graph of any step, divided where it is best on the device."""
        return overlap_messages(graph, row_division(graph, self.device))


NO_OVERLAP = Overlap()


class MovingExperts(NamedTuple):
    """Of a rank whose experts may move.

    turns: [layers, experts, period] int32, where choices go (see `shard`). totals: [layers, experts] int64, to which
    the choices of steps are added, if the rank counts.
    """

    turns: Tensor
    totals: Tensor
    counts: bool = True


def step_graphs(
    model: nn.Module,
    kind: str,
    deterministic: bool,
    table: tuned.Table = MappingProxyType({}),
    shard: RankShard | None = None,
    experts: MovingExperts | None = None,
    overlap: Overlap = NO_OVERLAP,
    context: Axis | Along | None = None,
    packed: Mapping[str, PackedWeight] = MappingProxyType({}),
    limits: DeviceLimits | None = None,
    passes: frozenset[str] = ALL_PASSES,
    sparse: BlockChoice | PageChoice | None = None,
    executor: str = "graph",
    narrow: bool = False,
) -> StepGraphs:
    """Capture a model, run the passes, and bind for `kind` (see `Operation.bind`). table: of the device, if it has one.
    shard: of the rank whose model it is, where several share one; a rank of one sums as they do in deterministic mode.
    experts: where its experts may move. overlap: from which number of tokens on messages travel while products run.
    context: along which ranks divide the tokens of steps. packed: what products read instead of these parameters, which
    may be without memory. limits: of the CUDA device, so that its products may read rows that are rounded already.
    passes: the names of those that run, see `strata.graph.passes`. sparse: which blocks of keys long prompts attend to,
    or which pages decodes do; None: all attend to all. executor: "compile" leaves it to torch.compile to fuse what
    computes logits, see `strata.graph.compile`. narrow: sums over ranks travel in 8 bits in large steps.

    Raises NotImplementedError if an operation has no implementation there. Only on CUDA, and not in deterministic mode,
    are there implementations for which the passes pay that look at the number of rows.
    """
    if executor == "compile":
        passes &= {"merge"}
    captured, head = _captured(model, shard)
    counts = operation_counts(captured)
    if head is not None:
        counts += operation_counts(head)
    if shard is not None:
        captured = _of_rank(captured, shard, experts, deterministic)
        head = None if head is None else _of_rank(head, shard, experts, deterministic)
    quantize(captured, packed)
    if head is not None:
        quantize(head, packed)
    if isinstance(sparse, PageChoice):
        select_pages(captured, sparse)
    dtype, undivided, division = next(model.parameters()).dtype, captured, None
    if shard is not None and shard.kept.ranks > 1:
        value = 0 if shard.config.latent is None else shard.config.latent.value
        division = KeyDivision(Along(KEYS_AXIS, shard.kept.ranks), shard.kept, dtype, value)
        captured = divide_keys(copied(undivided), division)
    axes = dict(NO_AXES if shard is None else shard.axes)
    if context is not None:
        axes[CONTEXT_AXIS] = context
    part = None if shard is None or shard.own_tokens or _has_all_columns(shard) else VocabularyPart.of(shard)
    by_rows = kind == "cuda" and not deterministic and executor == "graph"

    def fused(
        *, counted: bool = True, choice: BlockChoice | None = None, source: fx.GraphModule = captured
    ) -> fx.GraphModule:
        graph = copied(source) if head is None else compose(source, head)
        if choice is not None:
            sparsify_attention(graph, choice)
        if shard is not None and shard.own_tokens:
            leave_out_padding(graph, Along(TENSOR_AXIS, shard.size))
        if counted and experts is not None and experts.counts:
            count_experts(graph, experts.totals)
        return fuse(run(merge, graph), passes)

    def run(one: Callable[[fx.GraphModule], fx.GraphModule], graph: fx.GraphModule) -> fx.GraphModule:
        return one(graph) if one.__name__ in passes else graph

    def with_messages(graph: fx.GraphModule) -> fx.GraphModule:
        return run(fuse_messages, graph) if by_rows and shard is not None else graph

    def whole() -> fx.GraphModule:
        return with_messages(fused())

    def of_rows(graph: fx.GraphModule) -> fx.GraphModule:
        return take_rows(graph) if head is None else gather_after_attention(graph)

    def any_step(**which: Any) -> fx.GraphModule:
        graph = fused(**which)
        return of_rows(run(fuse_gated_products, graph) if by_rows else graph)

    multiplies = None if limits is None else partial(multiplies_rounded, dtype=dtype, limits=limits)
    may_round = by_rows and fuse_rounding.__name__ in passes
    rounds = may_round and multiplies is not None and any(map(multiplies, packed.values()))

    def with_rounding(graph: fx.GraphModule) -> fx.GraphModule:
        return graph if multiplies is None or not rounds else fuse_rounding(graph, dtype, multiplies)

    def bound(graph: fx.GraphModule) -> fx.GraphModule:
        return bind(graph, kind, deterministic, axes)

    small = large = divided = None
    if context is not None and context.size > 1:
        # Nobody counts experts there: a rank has a share of the tokens, and the slots of all.
        divided = bound(with_messages(divide_tokens(any_step(counted=False), Along(CONTEXT_AXIS, context.size))))
    if by_rows:
        small = bound(run(fuse_sent_products, run(fuse_products, run(fuse_decode_attention, whole()))))
        large = bound(with_rounding(run(fuse_decode_attention, whole())))
    elif kind == "cuda":
        small = large = bound(whole())
    sparse_hidden = sparse_logits = None
    sparse_keys = 0
    if isinstance(sparse, BlockChoice):
        sparse_keys = sparse.least_keys
        sparse_hidden = bound(fuse(run(merge, sparsify_attention(copied(captured), sparse)), passes))
        sparse_logits = bound(with_messages(any_step(choice=sparse)))
    whole_prompts = gathered_hidden = gathered_logits = None
    if shard is not None and division is not None:
        whole_prompts = bound(fuse(run(merge, copied(undivided)), passes))
        gathering = gather_keys(undivided, division)
        gathered_hidden = bound(fuse(run(merge, copied(gathering)), passes))
        gathered_logits = bound(with_messages(any_step(source=gathering)))
    logits = any_step()
    narrowed = None
    if narrow:
        assert shard is not None
        large_step = narrow_messages(of_rows(fused()), Along(TENSOR_AXIS, shard.size), shard.whole.hidden_size, dtype)
        large_step = with_rounding(large_step)
        narrowed = bound(run(fuse_gated_products, large_step) if by_rows else large_step)
    exchange_from = None if shard is None or deterministic else shard.exchange_tokens(dtype)
    exchanged = None
    if shard is not None and exchange_from is not None:
        own_rows = Along(TENSOR_AXIS, shard.size), shard.index
        exchanged = bound(exchange_rows(any_step(), *own_rows, counted=experts is not None))
    has_sums = shard is not None and not shard.own_tokens
    overlap_tokens = overlap.least_tokens(logits) if has_sums and not deterministic else None
    made = StepGraphs(
        logits=bound(with_messages(logits)),
        rounded_logits=bound(run(fuse_gated_products, with_rounding(with_messages(of_rows(fused())))))
        if rounds
        else None,
        overlapped_logits=None if overlap_tokens is None else bound(with_messages(overlap.apply(any_step()))),
        divided=divided,
        sparse_hidden=sparse_hidden,
        sparse_logits=sparse_logits,
        sparse_keys=sparse_keys,
        hidden=bound(fuse(run(merge, captured), passes)),
        head=None if head is None else bound(head),
        decode_small_batch=small,
        decode_large_batch=large,
        recorded_inputs=bound(capture(InputsOfStep(recorded=division is None, missing=True))),
        mixed_inputs=bound(capture(InputsOfStep(recorded=False, missing=True))),
        prompt_inputs=bound(capture(InputsOfStep(recorded=False, missing=False))),
        divided_inputs=bound(capture(DividedInputsOfStep(fresh=False))),
        fresh_inputs=bound(capture(DividedInputsOfStep(fresh=True))),
        draw=bound(capture(DrawOfStep(part, filtered=False))),
        draw_filtered=bound(capture(DrawOfStep(part, filtered=True))),
        part=part,
        captured=counts,
        table=table,
        overlap_tokens=overlap_tokens or 0,
        has_copies=overlap_tokens is not None and overlap.device is not None,
        narrow_logits=narrowed,
        exchanged_logits=exchanged,
        exchange_tokens=exchange_from or 0,
        whole_prompts=whole_prompts,
        gathered_hidden=gathered_hidden,
        gathered_logits=gathered_logits,
        key_gathers=None if shard is None or division is None else KeyGathers.of(shard, dtype),
    )
    if executor == "compile":
        for graph in (made.logits, made.decode_small_batch):
            if graph is not None:
                graph.forward = compiled(graph)  # the graph itself is what is costed
    return made


def _of_rank(
    graph: fx.GraphModule, shard: RankShard, experts: MovingExperts | None, deterministic: bool
) -> fx.GraphModule:
    if _has_all_columns(shard):
        return graph
    along, turns = Along(TENSOR_AXIS, shard.size), None if experts is None else experts.turns
    shard_graph(graph, shard.placements, along, shard.index, shard.slots, turns, own_tokens=shard.own_tokens)
    return slice_products(graph, shard.placements, shard.size) if deterministic else graph


def _captured(model: nn.Module, shard: RankShard | None) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """A model and its head; of several stages what one of them has, with its messages."""
    if shard is None or shard.stages == 1:
        return capture(model), capture_head(model)
    with torch.device("meta"):
        whole = build(shard.divided)
    own, head = capture_stage(whole, *shard.layers, model)
    dtype = next(model.parameters()).dtype
    return exchange(own, Along(PIPELINE_AXIS, shard.stages), shard.stage, shard.whole.hidden_size, dtype), head


def _has_all_columns(shard: RankShard) -> bool:
    """Of a stage of one rank, which computes its layers as one rank alone would."""
    return shard.stages > 1 and shard.size == 1
