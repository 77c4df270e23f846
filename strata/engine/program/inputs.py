"""What the device makes the inputs of a step of, and what it draws from: captured beside the model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from strata.engine.ranks.vocabulary_shard import VocabularyShard
from strata.engine.sampler import DrawInputs, draw_ids
from strata.kernels.attention.query_chunks import Rows, query_chunks
from strata.kernels.state.gather_tables import gather_tables, newest_tokens


class StepInputs(NamedTuple):
    """What the device makes the inputs of a step of: see `gather_tables` and `newest_tokens`."""

    tables: Tensor
    rows: Tensor
    offsets: Tensor
    lengths: Tensor
    slot_mapping: Tensor
    page_size: int
    tokens: Tensor
    sources: Tensor
    newest: Tensor


class QueryChunkInputs(NamedTuple):
    """What the prompts of a step are divided by: see `query_chunks`."""

    step: StepInputs
    bounds: Tensor
    rows: Rows


class DrawStep(NamedTuple):
    """Logits [rows, vocabulary], how they are sampled, and where the ids go: slots [rows] of newest [slots] int32."""

    logits: Tensor
    inputs: DrawInputs
    newest: Tensor
    slots: Tensor


class InputsOfStep(nn.Module):
    """captured: the step enters the page of each last token itself. missing: there are ids that the host lacks."""

    def __init__(self, *, captured: bool, missing: bool) -> None:
        super().__init__()
        self._captured, self._missing = captured, missing

    def forward(self, step: StepInputs) -> tuple[Tensor, Tensor]:
        tokens = newest_tokens(step.tokens, step.sources, step.newest) if self._missing else step.tokens
        if self._captured:
            where = (step.rows, step.offsets, step.lengths, step.slot_mapping)
            return tokens, gather_tables(step.tables, *where, step.page_size)
        return tokens, torch.index_select(step.tables, 0, step.rows)


class ChunkedInputsOfStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._inputs = InputsOfStep(captured=True, missing=True)

    def forward(self, given: QueryChunkInputs) -> tuple[Tensor, Tensor, Tensor]:
        step = given.step
        return *self._inputs(step), query_chunks(step.offsets, step.lengths, given.bounds, given.rows)


class DrawOfStep(nn.Module):
    def __init__(self, part: VocabularyShard | None, *, filtered: bool) -> None:
        super().__init__()
        self._part = None if part is None else part.unbound()
        self._filtered = filtered

    def forward(self, step: DrawStep) -> tuple[Tensor, Tensor]:
        ids = draw_ids(step.logits, step.inputs, self._filtered, self._part)
        return ids, step.newest.index_put_((step.slots,), ids)
