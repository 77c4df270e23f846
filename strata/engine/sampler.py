"""Chooses the next id of each sequence from its logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
from torch import Tensor

from strata.engine.request import Sequence
from strata.engine.sampling_params import SamplingParams
from strata.kernels.sampling import filter_logits, gumbel_sample, logprobs, penalize


@dataclass(frozen=True)
class DrawRow:
    """One row of logits to sample: the sequence, its slot, and how many tokens it has before this draw."""

    sequence: Sequence
    slot: int
    length: int

    @property
    def params(self) -> SamplingParams:
        return self.sequence.request.params

    @property
    def drawn(self) -> int:
        return self.length - self.sequence.prompt_length


@dataclass(frozen=True)
class LogprobTensors:
    """The model's own log-probabilities of rows: of the ids that were drawn, and of the likeliest ids.

    chosen, ranks: [rows]; top_ids, top: [rows, most]. Ranks count from 1.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    def cpu(self) -> LogprobTensors:
        return LogprobTensors(self.chosen.cpu(), self.ranks.cpu(), self.top_ids.cpu(), self.top.cpu())


def sampling_seed(sequence: Sequence, engine_seed: int) -> int:
    """The int64 seed of one sequence: of the request's own seed if it has one, else of the engine's and the request."""
    request = sequence.request
    own = f"request {request.params.seed}" if request.params.seed is not None else f"engine {engine_seed} {request.id}"
    digest = hashlib.blake2b(f"{own} {sequence.index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def needs_more_than_temperature(params: SamplingParams) -> bool:
    """Whether a row takes the long way: filters, penalties, forbidden ids, or log-probabilities to report."""
    return bool(
        params.top_k > 0
        or params.top_p < 1
        or params.min_p > 0
        or penalizes(params)
        or params.logit_bias
        or params.min_tokens > 0
        or params.bad_words
        or params.logprobs is not None
    )


def penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def draw_by_temperature(logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
    """Ids [rows] int32 from logits [rows, vocabulary]: the likeliest where the temperature is 0, else sampled.

    No host synchronization, so that it can be part of a CUDA graph.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    ids: Tensor = gumbel_sample(scaled, seeds, steps, greedy)
    return ids


class Sampler:
    """Samples rows that need more than a temperature.

    Penalties count what a sequence already holds, and its newest id may be known only to the device: so the ids of
    sequences with penalties are kept there, a row a slot, [slots, max_length].
    """

    def __init__(self, slots: int, max_length: int, device: torch.device) -> None:
        self._slots, self._max_length, self._device = slots, max_length, device
        self._history: Tensor | None = None

    def admit(self, sequence: Sequence, slot: int) -> None:
        """The slot now belongs to `sequence`: take over its ids if they will be counted."""
        if not penalizes(sequence.request.params):
            return
        if self._history is None:
            shape = (self._slots, self._max_length + 1)
            self._history = torch.zeros(shape, dtype=torch.int64, device=self._device)
        ids = torch.tensor(sequence.tokens, dtype=torch.int64)
        self._history[slot, : len(ids)] = ids.to(self._device)

    def draw(
        self, logits: Tensor, rows: Rows[DrawRow], temperatures: Tensor, seeds: Tensor, steps: Tensor
    ) -> tuple[Tensor, LogprobTensors | None]:
        """Ids [rows] int32 from logits [rows, vocabulary], and log-probabilities if any row asks for them.

        The order is vLLM's: log-probabilities of the model itself; then bias and forbidden ids, penalties, temperature,
        min-p, top-k, top-p.
        """
        raw = logits.float()
        edited = self._penalized(self._edited(raw, rows), rows)
        greedy = temperatures == 0
        scaled = edited / torch.where(greedy, 1.0, temperatures)[:, None]
        ids = gumbel_sample(self._filtered(scaled, rows), seeds, steps, greedy)
        if self._history is not None:
            self._remember(ids, rows)
        most = max((row.params.logprobs for row in rows if row.params.logprobs is not None), default=None)
        return ids, None if most is None else LogprobTensors(*logprobs(raw, ids, most))

    def _edited(self, logits: Tensor, rows: Rows[DrawRow]) -> Tensor:
        at: list[int] = []
        ids: list[int] = []
        added: list[float] = []
        for index, row in enumerate(rows):
            for token, bias in (row.params.logit_bias or {}).items():
                at.append(index)
                ids.append(token)
                added.append(bias)
            for token in forbidden(row):
                at.append(index)
                ids.append(token)
                added.append(-torch.inf)
        if not at:
            return logits
        where = (torch.tensor(at, device=self._device), torch.tensor(ids, device=self._device))
        return logits.index_put(where, torch.tensor(added, device=self._device), accumulate=True)

    def _penalized(self, logits: Tensor, rows: Rows[DrawRow]) -> Tensor:
        chosen = [index for index, row in enumerate(rows) if penalizes(row.params)]
        if not chosen or self._history is None:
            return logits
        picked = [rows[index] for index in chosen]
        counts, in_prompt = self._counts(picked, logits.shape[1])
        index = torch.tensor(chosen, device=self._device)
        penalized = penalize(
            logits[index],
            counts,
            in_prompt,
            self._column([row.params.repetition_penalty for row in picked]),
            self._column([row.params.presence_penalty for row in picked]),
            self._column([row.params.frequency_penalty for row in picked]),
        )
        return logits.index_copy(0, index, penalized)

    def _counts(self, rows: Rows[DrawRow], vocabulary: int) -> tuple[Tensor, Tensor]:
        """How often each id stands in each row's output [rows, vocabulary], and whether it stands in its prompt."""
        assert self._history is not None
        longest = max(row.length for row in rows)
        ids = self._history[torch.tensor([row.slot for row in rows], device=self._device), :longest]
        place = torch.arange(longest, device=self._device)
        in_prompt = place < self._column([row.sequence.prompt_length for row in rows])[:, None]
        held = place < self._column([row.length for row in rows])[:, None]
        zeros = torch.zeros((len(rows), vocabulary), dtype=torch.int32, device=self._device)
        output = zeros.scatter_add(1, ids, (held & ~in_prompt).int())
        prompt = zeros.scatter_add(1, ids, (held & in_prompt).int())
        return output, prompt > 0

    def _filtered(self, scaled: Tensor, rows: Rows[DrawRow]) -> Tensor:
        if all(row.params.top_k <= 0 and row.params.top_p == 1 and row.params.min_p == 0 for row in rows):
            return scaled
        top_k = torch.tensor([max(row.params.top_k, 0) for row in rows], dtype=torch.int32, device=self._device)
        top_p = self._column([row.params.top_p for row in rows])
        min_p = self._column([row.params.min_p for row in rows])
        return filter_logits(scaled, top_k, top_p, min_p)

    def _remember(self, ids: Tensor, rows: Rows[DrawRow]) -> None:
        assert self._history is not None
        slots = torch.tensor([row.slot for row in rows], device=self._device)
        places = torch.tensor([row.length for row in rows], device=self._device)
        self._history.index_put_((slots, places), ids.long())

    def _column(self, values: Rows[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)


def forbidden(row: DrawRow) -> set[int]:
    """Ids that the row may not draw now: ends before `min_tokens`, and last ids of bad words that would be completed.

    A bad word of several ids can only be judged when all ids of the sequence are known to the host.
    """
    banned: set[int] = set()
    if row.drawn < row.params.min_tokens:
        banned |= row.params.stop_ids
        if not row.params.ignore_eos:
            banned |= row.sequence.request.eos_ids
    for word in row.sequence.request.bad_words:
        before = word[:-1]
        if not before or tuple(row.sequence.tokens[row.length - len(before) : row.length]) == before:
            banned.add(word[-1])
    return banned
