"""The kinds of steps that an engine has, each with the graph that suits it and when it is taken.

A capability that changes how a step runs is a function here: it makes the variant of a model that has it, and no other
place asks for it. Of those that are for a step the first is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import fx

from strata.comm.operations import Along
from strata.engine.program.shape import StepShape
from strata.engine.program.source import StepSource
from strata.engine.ranks.prefill_context_parallel import CONTEXT_AXIS
from strata.graph.compose import copied
from strata.graph.fuse import fuse_decode_attention, fuse_gated_products
from strata.graph.fuse_products import fuse_products
from strata.graph.product_times import measured_seconds, products_of
from strata.graph.ranks.exchange_rows import exchange_rows
from strata.graph.ranks.fuse_messages import fuse_gemm_all_reduce
from strata.graph.ranks.hierarchical_sums import ACROSS_AXIS
from strata.graph.ranks.overlap import overlap
from strata.graph.ranks.overlap_rule import overlapping_tokens, row_split
from strata.graph.ranks.quantize_messages import quantize_messages
from strata.graph.ranks.shard_keys import gather_keys
from strata.graph.ranks.shard_tokens import shard_tokens
from strata.graph.sparsify_attention import sparsify_attention
from strata.kernels import tuned
from strata.kernels.attention.sparse.block_choice import BlockChoice
from strata.kernels.choose import Thresholds
from strata.models.state import attention_rows
from strata.parallel.serving_shard import TENSOR_AXIS, RankShard


@dataclass(frozen=True, eq=False)
class StepVariant:
    """One kind of step of a model, rewritten by passes and bound for a kind of device.

    name: as results and drawings have it. when: whether it is for a step. graph: from a Batch, and what `inputs` names
    of the step's buffer, to logits [rows, vocabulary or part], of a stage before the last to hidden [tokens, hidden].
    inputs: "rows" [rows] int32, the tokens whose logits are wanted, without which they are those of all; "chosen",
    which of the rows of all ranks they are. hidden: Batch to hidden [tokens, hidden] of such steps, where that is not
    as in others. captured: False where such steps replay no CUDA graph. library: cuDNN may attend for their prompts.
    least: rows of the shortest such step.
    """

    name: str
    when: Callable[[StepShape], bool]
    graph: fx.GraphModule
    inputs: tuple[str, ...] = ("rows",)
    hidden: fx.GraphModule | None = None
    captured: bool = True
    library: bool = True
    least: int = 0


def of_rows(name: str, least: int, graph: fx.GraphModule, *, launched: bool = False) -> StepVariant:
    """For steps of so many rows or more. launched: which replay no CUDA graph."""

    def when(shape: StepShape) -> bool:
        return shape.rows >= least and not (launched and shape.size is not None)

    return StepVariant(name, when, graph, least=least)


def context_parallel(source: StepSource) -> Iterator[StepVariant]:
    """Ranks divide the tokens of long prompts (prefill context parallelism)."""
    context = source.target.context
    if context is not None and context.size > 1:
        # Nobody counts experts there: a rank has a share of the tokens, and the slots of all.
        graph = shard_tokens(source.logits_of_rows(counted=False), Along(CONTEXT_AXIS, context.size))
        graph = source.bound(source.with_messages(graph))
        yield StepVariant("divided", _is_divided, graph, ("rows", "chosen"))


def _is_divided(shape: StepShape) -> bool:
    return shape.share is not None or (shape.size is not None and shape.size.ranks > 1)


def sparse(source: StepSource) -> Iterator[StepVariant]:
    """Long prompts attend to blocks of their keys."""
    choice = source.target.sparse
    if not isinstance(choice, BlockChoice):
        return

    def when(shape: StepShape) -> bool:
        step = shape.step
        return step is not None and bool(((step.counts > 1) & (step.ends >= choice.min_keys)).any())

    graph = source.bound(source.with_messages(source.logits_of_rows(choice=choice)))
    hidden = source.hidden(sparsify_attention(copied(source.body), choice))
    yield StepVariant("sparse_logits", when, graph, hidden=hidden, captured=False, library=False)


class KeyGathers(NamedTuple):
    """key: bytes of a token's keys and values of one layer. joined: of what all ranks find for a token's queries there,
    in float32."""

    key: int
    joined: int

    @staticmethod
    def of(shard: RankShard, dtype: torch.dtype) -> KeyGathers:
        """Of a rank of a model in `dtype`."""
        config, rows = shard.config, attention_rows(shard.config)
        width = config.head_dim if config.latent is None else config.latent.rank
        heads = shard.kept.ranks * config.num_heads
        key = rows.tensors * rows.shape[0] * rows.shape[1] * (rows.dtype or dtype).itemsize
        return KeyGathers(key, 4 * heads * (width + 1))

    def pays(self, counts: NDArray[Any], ends: NDArray[Any], page_tokens: int) -> bool:
        """Of a step that runs so many tokens of sequences that have so many then, [sequences] each: with prompts, and
        the keys of all, in as many pages of `page_tokens` as the longest has, are no more bytes than what would be
        joined. So gathered keys find room where that does."""
        tokens = int(counts.sum())
        if tokens == len(counts):
            return False
        longest = -(-int(ends.max(initial=0)) // page_tokens) * page_tokens
        return len(ends) * longest * self.key <= tokens * self.joined


def gathered(source: StepSource) -> Iterator[StepVariant]:
    """Ranks that divide keys by sequence gather those that a step reads, where that is fewer bytes."""
    shard = source.target.shard
    if shard is None or source.division is None:
        return
    gathers, page_tokens = KeyGathers.of(shard, source.dtype), source.asked.page_size * shard.kept.ranks

    def when(shape: StepShape) -> bool:
        step = shape.step
        return shape.size is None and step is not None and gathers.pays(step.counts, step.ends, page_tokens)

    body = gather_keys(copied(source.undivided), source.division)
    graph = source.bound(source.with_messages(source.logits_of_rows(body=body)))
    yield StepVariant("gathered_logits", when, graph, hidden=source.hidden(body), library=False)


def decodes(source: StepSource) -> Iterator[StepVariant]:
    """Every sequence has one new token, so all logits are wanted; few rows let products take up norms and gating."""
    if source.target.kind != "cuda":
        return
    if not source.by_rows:
        graph = source.bound(source.with_messages(source.logits()))
        yield StepVariant("decode", _replays_decodes, graph, ())
        return

    def whole() -> fx.GraphModule:
        return source.run(fuse_decode_attention, source.with_messages(source.logits()))

    small = source.bound(source.run(fuse_gemm_all_reduce, source.run(fuse_products, whole())))
    large = source.bound(source.with_rounding(whole()))
    table, rounds, known = source.target.table, source.rounds, source.target.thresholds

    def when(shape: StepShape) -> bool:
        # Products that take up norms do not round their rows.
        if not shape.replays_decodes or (rounds and shape.sequences > known.quantized_rows):
            return False
        return fused_products_pay(small, large, shape.sequences, table, known)

    yield StepVariant("decode_small_batch", when, small, ())
    yield StepVariant("decode_large_batch", _replays_decodes, large, ())


def _replays_decodes(shape: StepShape) -> bool:
    return shape.replays_decodes


def fused_products_pay(
    fused: fx.GraphModule, apart: fx.GraphModule, rows: int, table: tuned.Table, known: Thresholds
) -> bool:
    """Whether products of so many rows are the faster for taking up what is between them, by what was measured."""
    if rows <= known.fused_rows:
        return True
    together, alone = (measured_seconds(products_of(graph), rows, table) for graph in (fused, apart))
    if together is None or alone is None:
        return rows <= known.fused_rows_unmeasured
    return together * known.fused_in_layers <= alone


def exchanged(source: StepSource) -> Iterator[StepVariant]:
    """In large steps, which are launched, rows go to the ranks of their experts alone."""
    shard = source.target.shard
    least = None if shard is None or source.asked.deterministic else shard.exchange_tokens(source.dtype)
    if shard is None or least is None:
        return
    own = Along(TENSOR_AXIS, shard.size), shard.index
    graph = exchange_rows(source.logits_of_rows(), *own, counted=source.target.experts is not None)
    yield of_rows("exchanged_logits", least, source.bound(graph), launched=True)


def narrowed(source: StepSource) -> Iterator[StepVariant]:
    """In large steps, sums over ranks travel in 8 bits."""
    shard = source.target.shard
    if not source.asked.quantized_messages or shard is None:
        return
    group = source.asked.all_reduce_group_size
    along = Along(TENSOR_AXIS, shard.size) if group == 1 else Along(ACROSS_AXIS, shard.size // group)
    graph = source.with_levels(source.of_rows(source.logits()))
    quantize_messages(graph, along, shard.whole.hidden_size // group, source.dtype)
    graph = source.with_rounding(graph)
    graph = source.bound(source.run(fuse_gated_products, graph) if source.by_rows else graph)
    yield of_rows("quantized_message_logits", source.target.thresholds.quantized_message_tokens, graph)


def overlapped(source: StepSource) -> Iterator[StepVariant]:
    """In large steps, messages between ranks travel while products of the other half of the rows run."""
    shard, least, device = source.target.shard, source.asked.overlapped_from, source.target.copies
    if shard is None or shard.attention_dp or source.asked.deterministic or least == 0:
        return
    if least is None and device is None:
        return  # a start need not make the graph to find that no device sends by copy engines
    graph = source.logits_of_rows()
    least = overlapping_tokens(graph, device) if least is None else least
    if least is not None:
        graph = source.bound(source.with_messages(overlap(graph, row_split(graph, device))))
        yield of_rows("overlapped_logits", least, graph)


def quantized_rows(source: StepSource) -> Iterator[StepVariant]:
    """In steps of many rows, what is in front of a product with a weight in 8 bits rounds them."""
    if source.rounds:
        graph = source.with_rounding(source.with_messages(source.of_rows(source.logits())))
        graph = source.bound(source.run(fuse_gated_products, graph))
        yield of_rows("quantized_logits", source.target.thresholds.quantized_rows + 1, graph)


def any_step(source: StepSource) -> Iterator[StepVariant]:
    yield StepVariant("logits", lambda _: True, source.bound(source.with_messages(source.logits_of_rows())))


VARIANTS: tuple[Callable[[StepSource], Iterator[StepVariant]], ...] = (
    context_parallel, sparse, gathered, decodes, exchanged, narrowed, overlapped, quantized_rows, any_step,
)  # fmt: skip


def variants_of(source: StepSource) -> tuple[StepVariant, ...]:
    """Those that a model has, in the order in which they are asked."""
    return tuple(variant for make in VARIANTS for variant in make(source))
