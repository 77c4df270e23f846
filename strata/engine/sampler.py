"""Chooses the next id of each sequence from its logits."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.cache.staging import fetch, send
from strata.engine.plan import NewSequence, Sampling
from strata.engine.ranks.vocabulary_shard import VocabularyShard
from strata.kernels.sampling.filters import apply_bitmask, filter_bounds
from strata.kernels.sampling.sampling import gumbel_sample, logprobs, penalize


class DrawRow(NamedTuple):
    """One row of logits to sample with all that sampling can do.

    length: tokens that the sequence has before this draw.
    banned: ids that this draw may not give, besides those that the sequence may never draw.
    is_complete: its grammar allows nothing but an end.
    """

    sequence: NewSequence
    length: int
    banned: tuple[int, ...] = ()
    is_complete: bool = False

    @property
    def sampling(self) -> Sampling:
        return self.sequence.sampling


@dataclass(frozen=True)
class LogprobTensors:
    """The model's own log-probabilities of rows: of the ids that were drawn, and of the likeliest ids.

    chosen, ranks: [rows]; top_ids, top: [rows, most]. Ranks count from 1.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    def fetch(self) -> LogprobTensors:
        """On the host, once the device has come so far."""
        return LogprobTensors(*(fetch(tensor) for tensor in (self.chosen, self.ranks, self.top_ids, self.top)))


def filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def penalizes(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def is_special(sampling: Sampling) -> bool:
    """Whether a row takes the long way: penalties, biased or banned ids, or log-probabilities to report."""
    return bool(
        penalizes(sampling)
        or sampling.logit_bias
        or sampling.min_tokens > 0
        or sampling.banned_ids
        or sampling.logprobs is not None
    )


class DrawInputs(NamedTuple):
    """How rows are sampled, a number a row.

    temperatures float32, 0 is greedy; seeds int64; steps int32: ids drawn before; top_k int32, 0 for no limit; top_p,
    min_p float32.
    """

    temperatures: Tensor
    seeds: Tensor
    steps: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def draw_ids(logits: Tensor, inputs: DrawInputs, filtered: bool, part: VocabularyShard | None = None) -> Tensor:
    """Ids [rows] int32 from logits [rows, vocabulary]; `NO_ID` where a row is no distribution.

    filtered: whether any row may have filters. part: whose logits they are, if not of the whole vocabulary; filters
    then need all of them on every rank. No host synchronization, so that it can be part of a CUDA graph.
    """
    temperatures, seeds, steps, top_k, top_p, min_p = inputs
    if part is not None:
        if not filtered:
            return part.draw(logits, temperatures, seeds, steps)
        logits = part.whole(logits)
    bounds = filter_bounds(logits, temperatures, top_k, top_p, min_p) if filtered else None
    ids: Tensor = gumbel_sample(logits, temperatures, seeds, steps, bounds)
    return ids


class Sampler:
    """Samples rows with penalties, biased or forbidden ids, or log-probabilities to report.

    Penalties count what a sequence already holds, and its newest id may be known only to the device: so the ids of
    sequences with penalties are kept there, a row a slot, [slots, max_length + 1] int64.
    """

    def __init__(self, slots: int, max_length: int, device: torch.device, part: VocabularyShard | None = None) -> None:
        """part: whose logits are sampled, where ranks divide the vocabulary; each edits those of its own ids."""
        self._slots, self._max_length, self._device = slots, max_length, device
        self._part = part
        self._history: Tensor | None = None

    def admit(self, sequence: NewSequence) -> None:
        """Take over the ids of a sequence that takes a slot, if they will be counted."""
        if not penalizes(sequence.sampling):
            return
        if self._history is None:
            shape = (self._slots, self._max_length + 1)
            self._history = torch.zeros(shape, dtype=torch.int64, device=self._device)
        ids = send(self._device, ids=np.array(sequence.tokens, dtype=np.int32))["ids"]
        self._history[sequence.slot, : len(ids)] = ids

    def draw(
        self,
        logits: Tensor,
        rows: Rows[DrawRow],
        inputs: DrawInputs,
        filtered: bool,
        masks: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, LogprobTensors | None]:
        """Ids [rows] int32 from logits [rows, vocabulary or part], and log-probabilities if any row asks for them.

        The order is vLLM's: log-probabilities of the model itself; then the masks of grammars (see `apply_bitmask`),
        bias and forbidden ids, penalties, temperature, min-p, top-k, top-p.
        """
        raw = logits.float()
        penalized = [(index, row) for index, row in enumerate(rows) if penalizes(row.sampling)]
        sent = send(self._device, **_edits(rows, self._part), **_penalties(penalized))
        edited = raw if masks is None else self.mask(raw.clone(), masks)
        if len(sent["edited_ids"]):
            where = (sent["edited_rows"].long(), sent["edited_ids"].long())
            edited = edited.index_put(where, sent["added"], accumulate=True)
        if penalized:
            edited = self._penalized(edited, sent, max(row.length for _, row in penalized))
        ids = draw_ids(edited, inputs, filtered, self._part)
        most = max((row.sampling.logprobs for row in rows if row.sampling.logprobs is not None), default=None)
        if most is None and not penalized:
            return ids, None
        known = ids.clamp(min=0).long()  # a row without an id has ended
        if penalized:
            assert self._history is not None
            place = (sent["slots"].long(), sent["lengths"].long())
            self._history.index_put_(place, known[sent["penalized"].long()])
        return ids, None if most is None else self.logprobs(raw, known, most)

    def mask(self, logits: Tensor, masks: tuple[Tensor, Tensor]) -> Tensor:
        """Rule out in place what the masks of grammars do; see `apply_bitmask`."""
        if self._part is None:
            apply_bitmask(logits, *masks)
        else:
            apply_bitmask(self._part.local(logits), *masks, self._part.first)
        return logits

    def logprobs(self, logits: Tensor, ids: Tensor, most: int) -> LogprobTensors:
        """Of ids [rows], by logits [rows, vocabulary or part] float32, and of the likeliest `most` ids."""
        found = logprobs(logits, ids, most) if self._part is None else self._part.logprobs(logits, ids, most)
        return LogprobTensors(*found)

    def _penalized(self, logits: Tensor, sent: dict[str, Tensor], longest: int) -> Tensor:
        rows = sent["penalized"].long()
        counts, in_prompt = self._counts(sent, longest, logits.shape[1])
        strengths = (sent[name] for name in ("repetition", "presence", "frequency"))
        return logits.index_copy(0, rows, penalize(logits[rows], counts, in_prompt, *strengths))

    def _counts(self, sent: dict[str, Tensor], longest: int, vocabulary: int) -> tuple[Tensor, Tensor]:
        """How often each id stands in each row's output [rows, vocabulary], and whether it stands in its prompt."""
        assert self._history is not None
        ids = self._history[sent["slots"].long(), :longest]
        place = torch.arange(longest, device=self._device)
        in_prompt = place < sent["prompt_lengths"][:, None]
        held = place < sent["lengths"][:, None]
        if self._part is not None:
            ids = ids - self._part.first
            held &= (ids >= 0) & (ids < self._part.count)
            ids = ids.clamp(0, vocabulary - 1)
        zeros = torch.zeros((len(ids), vocabulary), dtype=torch.int32, device=self._device)
        output = zeros.scatter_add(1, ids, (held & ~in_prompt).int())
        prompt = zeros.scatter_add(1, ids, (held & in_prompt).int())
        return output, prompt > 0


def _edits(rows: Rows[DrawRow], part: VocabularyShard | None) -> dict[str, NDArray[Any]]:
    """What is added to which columns of which rows; -inf to ids that are forbidden."""
    first, count = (0, None) if part is None else (part.first, part.count)
    edits = [
        (index, token - first, added)
        for index, row in enumerate(rows)
        for token, added in (*row.sampling.logit_bias, *((id, -np.inf) for id in forbidden(row)))
        if count is None or first <= token < first + count
    ]
    return {
        "edited_rows": np.array([edit[0] for edit in edits], dtype=np.int32),
        "edited_ids": np.array([edit[1] for edit in edits], dtype=np.int32),
        "added": np.array([edit[2] for edit in edits], dtype=np.float32),
    }


def _penalties(rows: Rows[tuple[int, DrawRow]]) -> dict[str, NDArray[Any]]:
    """Of the rows with penalties: where their ids are kept, how many there are, and how strong the penalties are."""
    held = [row for _, row in rows]
    return {
        "penalized": np.array([index for index, _ in rows], dtype=np.int32),
        "slots": np.array([row.sequence.slot for row in held], dtype=np.int32),
        "lengths": np.array([row.length for row in held], dtype=np.int32),
        "prompt_lengths": np.array([row.sequence.prompt_length for row in held], dtype=np.int32),
        "repetition": np.array([row.sampling.repetition_penalty for row in held], dtype=np.float32),
        "presence": np.array([row.sampling.presence_penalty for row in held], dtype=np.float32),
        "frequency": np.array([row.sampling.frequency_penalty for row in held], dtype=np.float32),
    }


def forbidden(row: DrawRow) -> set[int]:
    """Ids that the row may not draw now: ends before `min_tokens`, unless nothing else is allowed, and bad words."""
    sampling = row.sampling
    ids = {*sampling.banned_ids, *row.banned}
    if row.length - row.sequence.prompt_length < sampling.min_tokens and not row.is_complete:
        ids.update(sampling.end_ids)
    return ids
