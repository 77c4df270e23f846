"""A model on the meta device: the graphs that an engine runs on a device that need not be here, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from strata.cache.block_tables import table_pages
from strata.cache.state_pool import meta_states
from strata.cache.tables import BufferShape
from strata.cost.attention_times import Attends, Prompts
from strata.cost.nodes import NodeCost, node_costs
from strata.cost.step_costs import StepCosts, step_costs
from strata.cost.step_model import StepNodes
from strata.engine.captured_steps import gathered_rows_of, pure_prefill_rows_of
from strata.engine.engine_config import EngineSizes
from strata.engine.plan import Chunk, Draw, PlanArrays, StepPlan
from strata.engine.program.inputs import DrawStep, QueryChunkInputs, StepInputs
from strata.engine.program.program import StepChoice, StepProgram
from strata.engine.program.shape import StepShape
from strata.engine.sampler import DrawInputs
from strata.graph.buffers import CUDA_BLOCK, BufferPlan, buffer_plan
from strata.graph.trace import trace, trace_head
from strata.graph.walk import meta_indices, meta_pages
from strata.hardware.roofline import Workload
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.query_chunks import QueryChunks, Rows, keys_in_blocks, pure_prefill_rows
from strata.kernels.device_limits import DeviceLimits
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.families import build
from strata.parallel.serving_shard import RankShard


@dataclass(frozen=True)
class MetaModel:
    """A model without weights: the step program that an engine runs on a device that need not be here, and what its
    steps are called with. config: of a rank its own. limits: None of a CPU. shard: of the rank whose share it is, where
    several divide a model. deterministic: other kernels attend."""

    config: ModelConfig
    limits: DeviceLimits | None
    program: StepProgram
    sizes: EngineSizes
    shard: RankShard | None = None
    deterministic: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.sizes.pool.dtype

    @property
    def ranks(self) -> int:
        """That divide matrices."""
        return 1 if self.shard is None else self.shard.size

    @property
    def splits_tokens(self) -> bool:
        """Whether ranks divide the tokens of steps."""
        return self.program.division is not None

    @property
    def is_stage(self) -> bool:
        """Whether it has some of the layers, and others the rest."""
        return self.shard is not None and self.shard.stages > 1

    def of_sizes(self, **changed: Any) -> MetaModel:
        """The same graphs in an engine of other sizes, by the names of `EngineSizes`."""
        sizes = replace(self.sizes, **changed)
        return replace(self, sizes=sizes, program=self.program.replaying(sizes.captured))

    def over_pages(self, rounded: torch.dtype | None) -> MetaModel:
        """The same graphs over pages that keep keys and values in 8 bits; None: in the model's dtype."""
        return self.of_sizes(pool=replace(self.sizes.pool, quantized=rounded))

    def choose(self, workload: Workload) -> StepChoice:
        """What a step runs that samples a row of each sequence, those of one token first."""
        new, total, program = workload.new, workload.total, self.program
        count, decodes = len(new), _decodes(workload)
        if program.asks_sequences:
            return program.choose(StepShape.of(PlanArrays(_plan(workload))))
        behind = max((end - own for own, end in zip(new[decodes:], total[decodes:], strict=True)), default=0)
        rows = pure_prefill_rows(new) if new == total else None
        size = workload.tokens, count, count, count - decodes
        keys = keys_in_blocks(total[decodes:])
        return program.choose(
            StepShape(*size, decodes == count, pure_prefill_rows=rows, behind=behind, prompt_keys=keys)
        )

    def _batch(self, workload: Workload, choice: StepChoice | None) -> Batch:
        """What the graphs are called with in a step of that workload, one-token sequences first. choice: of what runs
        it, by which its attention is divided; None: it is not."""
        shape = self.sizes.pool
        pages = meta_pages(
            workload,
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            page_size=shape.page_size,
            rounded=shape.quantized,
            kept=shape.kept,
        )
        if choice is not None and (choice.size is not None or choice.library):
            most = table_pages(self.sizes.max_length, shape.page_tokens)  # as many as a sequence can have
            pages = replace(pages, tables=meta_indices(len(workload.new), most))
        if choice is not None and max(workload.new) > 1 and workload.tokens < 1 << 31:  # as many as a device can count
            size = choice.size
            indices = meta_indices(4, 1), meta_indices(2, 1), meta_indices(2, 1)
            chunks = QueryChunks(*indices, self._rows(choice)) if choice.library else None
            decodes = _decodes(workload) if size is None else (0 if size.pure_prefill else None)
            begin = decodes is not None and workload.new[decodes:] == workload.total[decodes:]
            parts = BatchSplit(pages.lengths, pages.lengths, meta_indices(2), decodes, chunks, begin)
            pages = replace(pages, parts=parts)
        tokens = meta_indices(workload.tokens)
        sequences = len(workload.new)
        states = meta_states(self.sizes.states, sequences)
        return Batch(tokens, tokens, meta_indices(sequences + 1), max(workload.new), pages, states=states)

    def attends(self, workload: Workload, choice: StepChoice) -> Attends | None:
        """What runs the attention of a step over pages; None where it is not known."""
        known = self.limits is not None and not self.deterministic and self.dtype.itemsize == 2
        if not known or self.config.latent is not None or not workload.tokens:
            return None
        kind: Prompts | None = None
        size, sequences = choice.size, len(workload.new) if choice.size is None else choice.size.sequences
        if max(workload.new) > 1:
            kind = "pages" if choice.library else "tiles"
            if size is None:
                sequences = _decodes(workload)
            elif size.pure_prefill:
                kind = "pure_prefill"
        config = self.config
        return Attends(
            config.num_heads, config.num_kv_heads, config.head_dim, self.dtype, sequences, config.longest, kind
        )

    def step(self, workload: Workload) -> StepNodes:
        """A step that samples a row of each sequence: with filters if one rank captured it, else without, as most are.

        Its nodes cost what its own tokens do, and run the kernels of the size to which a captured step is padded. Of a
        step whose tokens ranks divide, they are those of the first rank's share, and its padding. How long a captured
        step takes follows from the size to which it is padded (`StepNodes.timed`).
        """
        choice, program = self.choose(workload), self.program
        if choice.shape.share is not None:
            return self._share(len(workload.new), choice)
        size = choice.size
        inputs = program.inputs(choice, missing=1 in workload.new)
        draw = program.draw if size is None or program.part is not None else program.draw_filtered
        steps = [(self._arguments(workload, len(workload.new), choice), workload)]
        if size is not None:
            filled = _padded(workload, size)
            steps.append((self._arguments(filled, size.draws, choice), filled))

        timed: list[NodeCost] = []
        attends = self.attends(workload, choice)

        def nodes(part: int) -> list[NodeCost]:
            graph = (inputs, choice.variant.graph, draw)[part]
            costed, *padded = (
                [_attending(node, attends) for node in node_costs(graph, given[part], work, self.limits)]
                for given, work in steps
            )
            ran = padded[0] if padded else costed
            timed.extend(
                replace(by, cost=node.cost) if node.cost.cached else by for node, by in zip(costed, ran, strict=True)
            )
            return [
                replace(node, implementation=by.implementation, kernels=by.kernels)
                for node, by in zip(costed, ran, strict=True)
            ]

        made, ran = nodes(0), nodes(1)
        drawn = nodes(2) if program.head is not None else []
        return StepNodes(choice.variant.name, made, ran, drawn, size is not None, timed)

    def buffers(self, workload: Workload) -> BufferPlan | None:
        """Of the graph of `called`; None where ranks divide a step's tokens."""
        if self.choose(workload).shape.share is not None:
            return None
        return buffer_plan(*self.called(workload), self.limits, self._block)

    def planned_buffers(self, tokens: int, rows: int) -> BufferPlan:
        """Of a step that is one prompt of so many tokens and projects so many rows onto the vocabulary."""
        batch = self._batch(Workload((tokens,), (tokens,)), None)
        graph = self.program.replayed(BufferShape(tokens, tokens + 1, rows)).graph
        return buffer_plan(graph, (batch, meta_indices(rows)), self.limits, self._block)

    @property
    def _block(self) -> int:
        """Bytes of which the device's allocator gives multiples."""
        return 1 if self.limits is None else CUDA_BLOCK

    def called(self, workload: Workload) -> tuple[fx.GraphModule, Any]:
        """The graph that computes the logits of such a step, and what it is called with, padded if it is captured."""
        choice = self.choose(workload)
        size = choice.size
        filled = (workload, len(workload.new)) if size is None else (_padded(workload, size), size.draws)
        return choice.variant.graph, self._arguments(*filled, choice)[1]

    def traced(self, workload: Workload) -> list[NodeCost]:
        """What the nodes of the model cost in that step before any pass, those of the head of a row a sequence."""
        with torch.device("meta"):
            model = build(self.config).to(self.dtype)
        hidden = torch.empty(len(workload.new), self.config.hidden_size, dtype=self.dtype, device="meta")
        batch = self._batch(workload, self.choose(workload)._replace(size=None, library=False))
        return [*node_costs(trace(model), batch, workload), *node_costs(trace_head(model), hidden, workload)]

    def _share(self, draws: int, choice: StepChoice) -> StepNodes:
        """A rank's share of a step that samples so many rows."""
        program, size, share = self.program, choice.size, choice.shape.share
        assert share is not None
        rows = share.rows if size is None else size.tokens
        padding = (rows - share.tokens,) * (rows > share.tokens)
        workload = Workload((*share.counts.tolist(), *padding), (*share.ends.tolist(), *padding))
        inputs = program.inputs(choice, missing=1 in workload.new)

        def nodes(drawn: int) -> list[list[NodeCost]]:
            made, (batch, *chosen), draw = self._arguments(workload, drawn, choice)
            pages = replace(batch.pages, slot_mapping=meta_indices(rows * len(share.shares)))
            model = choice.variant.graph, (replace(batch, pages=pages), *chosen)
            given = (inputs, made), model, (program.draw, draw)
            return [node_costs(graph, one, workload, self.limits) for graph, one in given]

        read, ran, drawn = nodes(draws)
        padded = nodes(draws if size is None else size.draws)
        name = choice.variant.name
        return StepNodes(name, read, ran, drawn, size is not None, [node for part in padded for node in part])

    def _rows(self, choice: StepChoice) -> Rows:
        is_pure_prefill = choice.size is not None and choice.size.pure_prefill
        return (pure_prefill_rows_of if is_pure_prefill else gathered_rows_of)(self.config.num_heads, self.sizes.pool)

    def _arguments(self, workload: Workload, draws: int, choice: StepChoice) -> tuple[Any, ...]:
        """What the graphs of a step are called with: inputs; logits, of so many rows; draw."""
        batch, rows = self._batch(workload, choice), meta_indices(draws)
        assert batch.pages is not None
        tables = StepInputs(
            batch.pages.tables, meta_indices(len(workload.new)), batch.offsets, batch.pages.lengths,
            batch.pages.slot_mapping, batch.pages.page_size, batch.tokens, batch.tokens, rows,
        )  # fmt: skip
        floats = rows.new_empty(rows.shape, dtype=torch.float32)
        sampled = DrawInputs(floats, rows.new_empty(rows.shape, dtype=torch.int64), rows, rows, floats, floats)
        logits = torch.empty(draws, self.config.vocab_size, dtype=self.dtype, device="meta")
        inputs: StepInputs | QueryChunkInputs = tables
        if choice.library:
            inputs = QueryChunkInputs(tables, meta_indices(2), self._rows(choice))
        return inputs, (batch, *(rows for _ in choice.variant.inputs)), DrawStep(logits, sampled, rows, rows)

    @cached_property
    def step_costs(self) -> StepCosts:
        """The least that steps of this model cost."""

        def given(tokens: int, rows: int) -> tuple[Batch, Tensor]:
            return self._batch(Workload((1,) * tokens, (1,) * tokens), None), meta_indices(rows)

        return step_costs(self.program.logits, given)


def _plan(workload: Workload) -> StepPlan:
    """A step that samples a row of each sequence."""
    chunks = tuple(
        Chunk(slot, slot, total - new, new, (Draw(slot, slot),), 0, ())
        for slot, (new, total) in enumerate(zip(workload.new, workload.total, strict=True))
    )
    return StepPlan((), (), chunks, (), workload.tokens)


def _attending(node: NodeCost, attends: Attends | None) -> NodeCost:
    return replace(node, attends=attends) if node.is_attention else node


def _decodes(workload: Workload) -> int:
    """The sequences of one token that come first."""
    return next((at for at, new in enumerate(workload.new) if new > 1), len(workload.new))


def _padded(workload: Workload, size: BufferShape) -> Workload:
    """A step with the padding of its captured size, as the engine gives it to sequences of length 0."""
    spare, tokens = size.sequences - len(workload.new), size.tokens - workload.tokens
    more = (1,) * spare if size.tokens == size.sequences else (tokens, *(0,) * (spare - 1))
    return Workload(workload.new + more, workload.total + more)
