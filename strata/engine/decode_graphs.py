"""Decode steps as CUDA graphs: from each sequence's newest id to its logits, and from those to its next id."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from strata.cache.block_tables import BlockTables
from strata.cache.pool import KVPool
from strata.cache.staging import Staging
from strata.cache.tables import BufferShape, StepBuffer
from strata.engine.sampler import DrawInputs
from strata.engine.step_graphs import DrawStep, StepGraphs, StepInputs
from strata.graph.cudagraph import CudaGraphs, non_owning_view


def step_inputs(buffer: StepBuffer, tables: Tensor, page_size: int, newest: Tensor) -> StepInputs:
    """What a step's buffer holds, beside the block tables and the newest id of each slot."""
    names = ("table_rows", "positions", "slot_mapping", "tokens", "sources")
    rows, positions, slot_mapping, tokens, sources = (buffer.tensors[name] for name in names)
    return StepInputs(tables, rows, positions, slot_mapping, page_size, tokens, sources, newest)


def draw_inputs(buffer: StepBuffer, draws: int) -> DrawInputs:
    """How the first `draws` rows of a step are sampled, as views of its buffer."""
    tensors = buffer.tensors
    floats = (tensors[name][:draws].view(torch.float32) for name in ("temperatures", "top_p", "min_p"))
    temperatures, top_p, min_p = floats
    seeds = tensors["seeds"][: 2 * draws].view(torch.int64)
    return DrawInputs(temperatures, seeds, tensors["steps"][:draws], tensors["top_k"][:draws], top_p, min_p)


@dataclass(frozen=True)
class Recorded:
    """What a recorded step leaves, until the next replay: ids [bucket] int32, logits [bucket, vocabulary]."""

    ids: Tensor
    logits: Tensor


class DecodeGraphs:
    """Two CUDA graphs for each decode batch size: the model's, and that of drawing, temperature and filters included.

    The logits between them, which the next recording may overwrite, are there for a step to change before it draws, or
    to draw from in another way (penalties and the like).
    """

    def __init__(
        self,
        graphs: StepGraphs,
        pool: KVPool,
        tables: BlockTables,
        newest: Tensor,
        staging: list[Staging],
    ) -> None:
        self._graphs, self._pool, self._tables = graphs, pool, tables
        self._newest, self._staging = newest, staging
        self._recordings = CudaGraphs()
        self._outputs: dict[int, Recorded] = {}
        self._buffers: dict[int, dict[Staging, StepBuffer]] = {}

    def bucket(self, sequences: int) -> int | None:
        """The smallest recorded batch size that holds so many sequences; None if all are smaller."""
        return min((size for size in self._outputs if size >= sequences), default=None)

    def buffer(self, bucket: int, staging: Staging) -> StepBuffer:
        """The inputs of a bucket, with `staging` as their host side."""
        return self._buffers[bucket][staging]

    def run(self, bucket: int) -> Tensor:
        """The logits [bucket, vocabulary] of the inputs that have been sent."""
        self._recordings.replay((bucket, "run"))
        return self._outputs[bucket].logits

    def draw(self, bucket: int) -> Tensor:
        """The ids [bucket] int32 drawn from what `run` left, which the next step may read."""
        self._recordings.replay((bucket, "draw"))
        return self._outputs[bucket].ids

    def record(self, bucket: int) -> None:
        shape = BufferShape(bucket, bucket, bucket)
        device = self._staging[0].target(shape.size)
        self._buffers[bucket] = {staging: StepBuffer(shape, staging, device) for staging in self._staging}
        buffer = self._buffers[bucket][self._staging[0]]
        nothing = np.zeros(0, dtype=np.int32)
        buffer.place(self._tables, self._pool.shape.page_size, nothing, nothing, nothing)
        buffer.pad_draws(0, len(self._newest) - 1)
        buffer.send()
        graphs, model, newest = self._graphs, self._graphs.decode(bucket), self._newest
        assert model is not None
        inputs = step_inputs(buffer, self._tables.on_device, self._pool.shape.page_size, newest)
        made: list[Tensor] = []

        def run() -> None:
            tokens, tables = graphs.decode_inputs.forward(inputs)
            made[:] = [model.forward(buffer.batch(self._pool, tables, tokens, 1, ()))]

        def draw() -> None:
            step = DrawStep(made[0], draw_inputs(buffer, bucket), newest, buffer.tensors["draw_slots"])
            made[1:] = [graphs.draw_filtered.forward(step)[0]]

        self._recordings.record((bucket, "run"), run)
        self._recordings.record((bucket, "draw"), draw)
        logits, ids = made
        self._outputs[bucket] = Recorded(ids, non_owning_view(logits))
