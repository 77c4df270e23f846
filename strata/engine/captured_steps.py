"""Steps as CUDA graphs: from the ids that the host sends or the device has to logits, and from those to the next ids.

A CUDA graph serves all steps that fit into its buffer; what they leave of it is padding. Lengths, block tables and
which sequences decode are read from device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from strata.cache.block_tables import BlockTables
from strata.cache.pool import KVPool, PoolShape
from strata.cache.staging import Staging
from strata.cache.state_pool import StatePool
from strata.cache.tables import BufferShape, StepBuffer
from strata.engine.faults import is_lack_of_memory
from strata.engine.program.inputs import DrawStep, QueryChunkInputs, StepInputs
from strata.engine.program.program import StepProgram
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes
from strata.engine.sampler import DrawInputs
from strata.engine.steps.groups import WindowSteps
from strata.graph.cudagraph import CudaGraphStore
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.query_chunks import Rows, as_query_chunks


def step_inputs(buffer: StepBuffer, tables: Tensor, page_size: int, newest: Tensor, rank: int = 0) -> StepInputs:
    """What a step's buffer holds, beside the block tables and the newest id of each slot. rank: whose share of the step
    it is, if ranks divide it."""
    names = ("table_rows", "offsets", "lengths", "slot_mapping", "tokens", "sources")
    rows, offsets, lengths, slot_mapping, tokens, sources = (buffer.tensors[name] for name in names)
    if buffer.shape.ranks > 1:  # which has those of all ranks
        slot_mapping = slot_mapping.narrow(0, rank * buffer.shape.tokens, buffer.shape.tokens)
    return StepInputs(tables, rows, offsets, lengths, slot_mapping, page_size, tokens, sources, newest)


def draw_inputs(buffer: StepBuffer, draws: int) -> DrawInputs:
    """How the first `draws` rows of a step are sampled, as views of its buffer."""
    tensors = buffer.tensors
    floats = (tensors[name][:draws].view(torch.float32) for name in ("temperatures", "top_p", "min_p"))
    temperatures, top_p, min_p = floats
    seeds = tensors["seeds"][: 2 * draws].view(torch.int64)
    return DrawInputs(temperatures, seeds, tensors["steps"][:draws], tensors["top_k"][:draws], top_p, min_p)


def pure_prefill_rows_of(heads: int, pool: PoolShape) -> Rows:
    """How queries, keys, values and results of pure prefill steps lie, of so many heads of queries.

    `qk_rope_kv_write` leaves rotated queries in front of their keys, and values behind both as they were; what pools in
    8 bits hold of keys and of values it leaves apart.
    """
    width = pool.head_dim
    row, own = (heads + pool.kv_heads) * width, pool.kv_heads * width
    if pool.quantized is not None:
        return Rows(row, heads * width, own, own, pure_prefill=True)
    return Rows(row, heads * width, row, row + own, pure_prefill=True)


def gathered_rows_of(heads: int, pool: PoolShape) -> Rows:
    """The same of other steps, whose keys and values are gathered from pages."""
    own = pool.kv_heads * pool.head_dim
    return Rows(heads * pool.head_dim + own, heads * pool.head_dim, own, own)


Reason = Literal["too_large", "prompt_logprobs", "tags", "out_of_memory"]
"""Why a step replays no CUDA graph: no size is meant for it, it scores a prompt, a sequence of it has tags, or its size
could not be captured."""
REASONS: tuple[Reason, ...] = get_args(Reason)
# What is captured of a size; the last only where ranks divide the vocabulary.
_PARTS = ("run", "draw", "draw plain")


@dataclass
class CapturedOutputs:
    """What a captured step leaves, until the next replay: logits [draws, vocabulary or part], ids [draws] int32.

    plain_ids: of the draw without filters where there is one.
    """

    logits: Tensor
    ids: Tensor
    plain_ids: Tensor


class CapturedSteps:
    """Two CUDA graphs for each size of a step: the model's, and that of drawing, temperature and filters included; a
    third where ranks divide the vocabulary, so that they draw without filters from logits that they do not gather.

    The logits between them, which the next CUDA graph may overwrite, are there for a step to change before it draws, or
    to draw from in another way (penalties and the like).

    sizes: that are captured. lacking: for which the memory did not suffice. uncaptured: steps that replayed nothing, by
    why.
    """

    def __init__(
        self,
        program: StepProgram,
        pool: KVPool,
        tables: BlockTables,
        newest: Tensor,
        staging: list[Staging],
        graphs: CudaGraphStore,
        heads: int,
        windows: WindowSteps | None = None,
        states: StatePool | None = None,
        rank: int = 0,
        *,
        kernels_are_ready: bool = False,
    ) -> None:
        """heads: of the model's queries. windows: where some layers have pages of their own. states: where some have a
        fixed state. rank: whose share of steps it is that ranks divide. kernels_are_ready: see `Runner.capture`."""
        self._program, self._pool, self._tables = program, pool, tables
        self._pure_prefill_rows = pure_prefill_rows_of(heads, pool.shape)
        self._gathered_rows = gathered_rows_of(heads, pool.shape)
        self._windows, self._states = windows, states
        self._rank, self._kernels_are_ready = rank, kernels_are_ready
        self._newest, self._staging = newest, staging
        self._captured_graphs = graphs
        self._outputs: dict[BufferShape, CapturedOutputs] = {}
        self.sizes: list[BufferShape] = []
        self.lacking: list[BufferShape] = []
        self.uncaptured: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self._warm: set[tuple[str, int, int | None]] = set()
        self._buffers: dict[BufferShape, dict[Staging, StepBuffer]] = {}

    def count_uncaptured(self, shape: StepShape) -> None:
        """A step is launched that could have replayed a CUDA graph of its size."""
        reason: Reason = "too_large"
        if shape.scored:
            reason = "prompt_logprobs"
        elif shape.tagged:
            reason = "tags"
        elif shape.decodes or StepSizes(self.lacking).would_hold(shape):  # for all decodes there are sizes
            reason = "out_of_memory"
        self.uncaptured[reason] += 1

    def shortage(self, device: str) -> str | None:
        """What to tell once all sizes were to be captured; None if all of them are."""
        if not self.lacking:
            return None
        tokens = [size.tokens for size in self.lacking]
        return (
            f"out of memory on {device}: {len(tokens)} of {len(tokens) + len(self.sizes)} sizes of steps, of "
            f"{min(tokens):,} to {max(tokens):,} tokens, have no CUDA graph, so the host launches such steps kernel by "
            "kernel, which takes it longer: lower gpu_memory_utilization, num_pages, max_num_seqs or "
            "max_num_batched_tokens, or end what else uses the device"
        )

    def buffer(self, bucket: BufferShape, staging: Staging) -> StepBuffer:
        """The inputs of a bucket, with `staging` as their host side."""
        return self._buffers[bucket][staging]

    def run(self, bucket: BufferShape) -> Tensor:
        """The logits [draws, vocabulary] of the inputs that have been sent."""
        self._captured_graphs.replay((bucket, "run"))
        return self._outputs[bucket].logits

    def draw(self, bucket: BufferShape, filtered: bool) -> Tensor:
        """The ids [draws] int32 drawn from what `run` left, which the next step may read. filtered: some rows are."""
        if self._program.part is not None and not filtered:
            self._captured_graphs.replay((bucket, "draw plain"))
            return self._outputs[bucket].plain_ids
        self._captured_graphs.replay((bucket, "draw"))
        return self._outputs[bucket].ids

    def chunk_queries(
        self, inputs: StepInputs, parts: BatchSplit, *, pure_prefill: bool = False
    ) -> tuple[Tensor, Tensor, BatchSplit]:
        """Tokens, block tables and parts of a step in which cuDNN attends for prompts.

        inputs: with tables of as many pages as a sequence can have, since the plan is made for those. pure_prefill: it
        reads none of them.
        """
        rows = self._pure_prefill_rows if pure_prefill else self._gathered_rows
        tokens, tables, division = self._program.chunked_inputs.forward(QueryChunkInputs(inputs, parts.bounds, rows))
        return tokens, tables, replace(parts, query_chunks=as_query_chunks(division, rows))

    def capture(self, shape: BufferShape, *, may_lack: bool = True) -> None:
        """Capture the steps of one size, the largest before smaller ones, so that these fit in its memory. A size that
        the memory does not suffice for is `lacking`, and holds nothing, or raises if it may not."""
        try:
            self._capture(shape)
            return
        except (RuntimeError, MemoryError) as error:
            if not (may_lack and is_lack_of_memory(error)):
                raise
        # Here, where the error is gone: it held the tensors of what it came from.
        self._buffers.pop(shape, None)
        self._captured_graphs.discard([(shape, part) for part in _PARTS])
        self.lacking.append(shape)

    def drop(self) -> None:
        """Keep no CUDA graph: the messages between ranks in them keep the ranks together."""
        self._captured_graphs.discard([(shape, part) for shape in self.sizes for part in _PARTS])
        self.sizes.clear()

    def _capture(self, shape: BufferShape) -> None:
        device = self._staging[0].target(shape.size)
        self._buffers[shape] = {staging: StepBuffer(shape, staging, device) for staging in self._staging}
        buffer = self._buffers[shape][self._staging[0]]
        nothing = np.zeros(0, dtype=np.int32)
        buffer.place(self._tables, self._pool.shape.page_size, nothing, nothing, nothing)
        if self._windows is not None:
            self._windows.place(buffer, nothing, nothing, nothing)
        buffer.pad_draws(0, len(self._newest) - 1)
        is_decode = shape.tokens == shape.sequences
        parts = None if is_decode else buffer.divide(nothing, captured=True)
        buffer.send()
        program, newest = self._program, self._newest
        variant = program.replayed(shape)
        inputs = step_inputs(buffer, self._tables.on_device, self._pool.shape.page_size, newest, self._rank)
        longest = 1 if parts is None else shape.tokens
        made = CapturedOutputs(newest, newest, newest)

        def run() -> None:
            if parts is None or shape.prompts is None:
                divided = parts
                tokens, tables = program.captured_inputs.forward(inputs)
            else:
                tokens, tables, divided = self.chunk_queries(inputs, parts, pure_prefill=shape.pure_prefill)
            others = () if self._windows is None else self._windows.captured_tables(buffer, inputs, program)
            batch = buffer.batch(self._pool, tables, tokens, longest, (), divided, others, self._states)
            made.logits = variant.graph.forward(batch, *(buffer.tensors[name] for name in variant.inputs))

        def drawing() -> DrawStep:
            return DrawStep(made.logits, draw_inputs(buffer, shape.draws), newest, buffer.tensors["draw_slots"])

        def draw() -> None:
            made.ids = program.draw_filtered.forward(drawing())[0]

        def draw_plain() -> None:
            made.plain_ids = program.draw.forward(drawing())[0]

        # What compiles or is chosen when it first runs follows from the graph and tokens or sequences alone. Large ones
        # run for long: with a run of each 104 sizes of 8B took 6.2 s to capture, without 126 take 3.5.
        graph = 0 if is_decode else shape.ranks
        sizes: set[tuple[str, int, int | None]] = {("prompts", graph, shape.prompts)}
        sizes |= {("pure prefill", graph, shape.pure_prefill)}
        if not self._kernels_are_ready:
            sizes |= {("tokens", graph, shape.tokens), ("sequences", graph, shape.sequences)}
        warm = sizes <= self._warm
        self._keep((shape, "run"), run, warm)
        if program.head is not None:
            self._keep((shape, "draw"), draw, warm)
        if program.head is not None and program.part is not None:
            self._keep((shape, "draw plain"), draw_plain, warm)
        self._warm |= sizes
        made.logits = self._captured_graphs.lend(made.logits)
        self._outputs[shape] = made
        self.sizes.append(shape)

    def _keep(self, key: tuple[BufferShape, str], run: Callable[[], None], warm: bool) -> None:
        """Capture it. What is not warm in spite of ready kernels (a module that is loaded ends a capture) is run first
        after all; several ranks never come to that, whose messages would wait for the others."""
        try:
            self._captured_graphs.capture_graph(key, run, warm=warm)
            return
        except RuntimeError as error:
            if not (warm and self._kernels_are_ready) or is_lack_of_memory(error):
                raise
        self._captured_graphs.capture_graph(key, run)  # here, where the error is gone: it held tensors
