"""Executes step plans on one device: builds the batch, runs the graph, samples, and keeps new ids on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strata.cache.block_tables import BlockTables
from strata.cache.pool import KVPool
from strata.cache.staging import Staging
from strata.cache.tables import StepBuffer, StepShape
from strata.engine.decode_graphs import DecodeGraphs, draw_inputs, joined_tokens
from strata.engine.grammars.grammar import Masks, MasksUnderWay
from strata.engine.ledger import PROMPT_LOGPROB_ROWS
from strata.engine.plan import StepPlan
from strata.engine.request import Sequence
from strata.engine.sampler import (
    DrawRow,
    LogprobTensors,
    Sampler,
    draw_ids,
    filters,
    is_special,
    sampling_seed,
)
from strata.engine.step_graphs import StepGraphs
from strata.engine.transfer import send
from strata.kernels.attention.batch_parts import library_reach
from strata.kernels.sampling.bitmask import apply_bitmask
from strata.kernels.sampling.sampling import likeliest, logprobs


@dataclass(frozen=True)
class RunnerConfig:
    """max_sequences: slots; max_tokens: tokens of one step; max_length: tokens of one sequence; windows: the different
    ones of the model's attention layers; seed: of the engine; mask_ids: how many ids a mask of a grammar tells of."""

    max_sequences: int
    max_tokens: int
    max_length: int
    windows: frozenset[int | None]
    seed: int
    mask_ids: int


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens [first, first + rows) of a sequence, each given those before it."""

    sequence: Sequence
    first: int
    tensors: LogprobTensors


@dataclass(frozen=True)
class Launched:
    """A step that is under way. `wait` blocks until the host has its ids and log-probabilities.

    constrained: the sequences that drew under a mask. If a matcher is in its error state, the id of its sequence means
        nothing.
    """

    plan: StepPlan
    ids: Tensor
    done: torch.cuda.Event | None = None
    logprobs: LogprobTensors | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    constrained: tuple[Sequence, ...] = ()

    def wait(self) -> list[int]:
        """The new ids in the order of the plan's draws."""
        if self.done is not None:
            self.done.synchronize()
        ids: list[int] = self.ids.tolist()
        return ids


@dataclass(frozen=True)
class Undrawn:
    """A step whose logits are under way. Once the matchers of its rows know all ids before it come `Runner.mask` and
    then `Runner.draw`.

    bucket: whose recorded graph draws from the logits, None if none does; it can where no row is special.
    """

    plan: StepPlan
    rows: list[DrawRow]
    buffer: StepBuffer
    logits: Tensor
    bucket: int | None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    constrained: tuple[Sequence, ...] = ()
    masks: MasksUnderWay | None = None


class StepObserver(Protocol):
    """Told, while the host enqueues a step, where its work on the device begins and where it ends."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


class SlotState:
    """What the host keeps of each slot: its owner and how the owner samples."""

    def __init__(self, slots: int) -> None:
        self.owners: list[Sequence | None] = [None] * slots
        self.temperatures: NDArray[np.float32] = np.zeros(slots, np.float32)
        self.seeds: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.top_k: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.top_p: NDArray[np.float32] = np.ones(slots, np.float32)
        self.min_p: NDArray[np.float32] = np.zeros(slots, np.float32)
        self.filtered = [False] * slots
        self.special = [False] * slots
        self.constrained = [False] * slots

    def own(self, slot: int, sequence: Sequence, engine_seed: int) -> None:
        params = sequence.request.params
        self.owners[slot] = sequence
        self.temperatures[slot] = params.temperature
        self.seeds[slot] = sampling_seed(sequence, engine_seed)
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = max(params.top_k, 0), params.top_p, params.min_p
        self.filtered[slot] = filters(params)
        self.special[slot] = is_special(sequence.request)
        self.constrained[slot] = sequence.matcher is not None


class Runner:
    """Owns the KV pool, the block tables and each slot's newest id.

    On CUDA, steps in which every sequence runs one token replay a CUDA graph once `record_decode` has been called.
    observer: for benchmarks, None while nothing is measured.
    """

    def __init__(self, graphs: StepGraphs, pool: KVPool, config: RunnerConfig, device: torch.device) -> None:
        self.pool = pool
        self._graphs = graphs
        self._config, self._device = config, device
        self._reach = library_reach(pool.shape.dtype, pool.shape.head_dim, config.windows, config.max_length)
        most_pages = -(-config.max_length // pool.shape.page_size)
        self._tables = BlockTables(config.max_sequences, most_pages, device)
        self._slots = SlotState(config.max_sequences)
        self._sampler = Sampler(config.max_sequences, config.max_length, device)
        self._masks = Masks(config.mask_ids, config.max_sequences, device)
        # One id more than slots: padding rows of a CUDA graph read and write the last one.
        self._newest = torch.zeros(config.max_sequences + 1, dtype=torch.int32, device=device)
        largest = StepShape(config.max_tokens, config.max_sequences, config.max_sequences).size
        # Two, so that a step can be prepared while the one before it has not left its buffer.
        self._staging = [Staging(largest, device) for _ in range(2)]
        pinned = device.type == "cuda"
        self._returns = [torch.empty(config.max_sequences, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._decode: DecodeGraphs | None = None
        self.observer: StepObserver | None = None

    @torch.inference_mode()
    def record_decode(self, buckets: list[int]) -> Iterator[int]:
        """Record a CUDA graph for each batch size, the largest first so that the others fit in its memory."""
        self._decode = DecodeGraphs(self._graphs, self.pool, self._tables, self._newest, self._staging)
        for bucket in sorted(buckets, reverse=True):
            self._decode.record(bucket)
            yield bucket

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched | Undrawn:
        """Start a step; its ids come later. Pages and slots of the plan may be reused by the next plan at once.

        A step with constrained rows has to be drawn before the next is launched.
        """
        self._staging.reverse()
        self._returns.reverse()
        if plan.copies:
            self.pool.copy_pages(plan.copies)
        each_draws_once = all(chunk.count == 1 and len(chunk.draws) == 1 for chunk in plan.chunks)
        bucket = self._decode.bucket(len(plan.chunks)) if self._decode is not None and each_draws_once else None
        rows = self._admit(plan, recorded=bucket is not None)
        launched = self._launch_eager(plan, rows) if bucket is None else self._launch_recorded(plan, rows, bucket)
        if self.observer is not None and isinstance(launched, Launched):
            self.observer.end()
        return launched

    def mask(self, step: Undrawn) -> Undrawn:
        """Begin with the masks of a step; its matchers must be left alone until it is drawn."""
        sequences = [row.sequence for row in step.rows]
        matchers = [None if sequence.finished else sequence.matcher for sequence in sequences]
        held = zip(sequences, matchers, strict=True)
        constrained = tuple(sequence for sequence, matcher in held if matcher is not None)
        return replace(step, constrained=constrained, masks=self._masks.start(matchers))

    @torch.inference_mode()
    def draw(self, step: Undrawn) -> Launched:
        """Sample a step that has its masks; it has none if all that needed them have ended."""
        launched = self._draw(step, step.masks.send(self._device) if step.masks is not None else None)
        if self.observer is not None:
            self.observer.end()
        return replace(launched, constrained=step.constrained)

    def settle(self) -> None:
        """Wait until nothing of any step is under way, so that all buffers may be filled again."""
        self._masks.settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _send(self, buffer: StepBuffer) -> None:
        if self.observer is not None:
            self.observer.begin()
        self._tables.send()
        buffer.send()

    def _launch_recorded(self, plan: StepPlan, rows: list[DrawRow], bucket: int) -> Launched | Undrawn:
        assert self._decode is not None
        buffer = self._decode.buffer(bucket, self._staging[0])
        self._fill(buffer, plan, rows)
        self._send(buffer)
        logits = self._decode.run(bucket)
        special = any(self._slots.special[row.slot] for row in rows)
        undrawn = Undrawn(plan, rows, buffer, logits[: len(rows)], None if special else bucket)
        return undrawn if any(self._slots.constrained[row.slot] for row in rows) else self._draw(undrawn)

    def _launch_eager(self, plan: StepPlan, rows: list[DrawRow]) -> Launched | Undrawn:
        shape = StepShape(plan.tokens, len(plan.chunks), len(rows))
        buffer = StepBuffer(shape, self._staging[0], self._staging[0].target(shape.size))
        missing = self._fill(buffer, plan, rows)
        parts = None
        if self._device.type == "cuda":
            chunks = plan.chunks
            parts = buffer.divide([chunk.start for chunk in chunks], [chunk.count for chunk in chunks], self._reach)
        self._send(buffer)
        longest = max(chunk.count for chunk in plan.chunks)
        tokens = joined_tokens(buffer, self._newest) if missing else buffer.tensors["tokens"]
        most = max(chunk.start + chunk.count for chunk in plan.chunks)
        tables = self._tables.of(buffer.tensors["table_rows"], -(-most // self.pool.shape.page_size))
        batch = buffer.batch(self.pool, tables, tokens, longest, self._config.windows, parts)
        prompt_logprobs: tuple[PromptLogprobs, ...] = ()
        if any(chunk.sequence.request.params.prompt_logprobs is not None for chunk in plan.chunks):
            hidden = self._graphs.hidden(batch)
            prompt_logprobs = tuple(self._prompt_logprobs(plan, hidden))
            logits = self._graphs.head(hidden.index_select(0, buffer.tensors["rows"]))
        else:
            logits = self._graphs.logits(batch, buffer.tensors["rows"])
        if not rows:
            none = torch.empty(0, dtype=torch.int32, device=self._device)
            return self._finish(plan, none, None, prompt_logprobs)
        undrawn = Undrawn(plan, rows, buffer, logits, None, prompt_logprobs)
        return undrawn if any(self._slots.constrained[row.slot] for row in rows) else self._draw(undrawn)

    def _draw(self, step: Undrawn, masks: tuple[Tensor, Tensor] | None = None) -> Launched:
        """Sample a step's rows; masks: see `apply_bitmask`."""
        rows, buffer, logits = step.rows, step.buffer, step.logits
        reported = None
        special = step.bucket is None and any(self._slots.special[row.slot] for row in rows)
        if masks is not None and not special:
            apply_bitmask(logits, *masks)
        if step.bucket is not None:
            assert self._decode is not None
            return self._finish(step.plan, self._decode.draw(step.bucket)[: len(rows)])
        if not special and self._device.type == "cpu" and all(row.params.greedy for row in rows):
            ids = likeliest(logits)
        else:
            inputs = draw_inputs(buffer, len(rows))
            filtered = any(self._slots.filtered[row.slot] for row in rows)
            if special:
                ids, reported = self._sampler.draw(logits, rows, inputs, filtered, masks)
            else:
                ids = draw_ids(logits, inputs, filtered)
        self._newest[buffer.tensors["draw_slots"][: len(rows)]] = ids
        return self._finish(step.plan, ids, reported, step.prompt_logprobs)

    def _finish(
        self,
        plan: StepPlan,
        ids: Tensor,
        reported: LogprobTensors | None = None,
        prompt_logprobs: tuple[PromptLogprobs, ...] = (),
    ) -> Launched:
        if self._device.type == "cpu":
            return Launched(plan, ids, None, reported, prompt_logprobs)
        host = self._returns[0][: len(ids)]
        host.copy_(ids, non_blocking=True)
        reported = reported.fetch() if reported is not None else None
        prompt_logprobs = tuple(replace(part, tensors=part.tensors.fetch()) for part in prompt_logprobs)
        done = torch.cuda.Event()
        done.record()
        return Launched(plan, host, done, reported, prompt_logprobs)

    def _admit(self, plan: StepPlan, recorded: bool) -> list[DrawRow]:
        """Bring tables and slots up to the plan; returns who draws, in the plan's order."""
        rows: list[DrawRow] = []
        for chunk in plan.chunks:
            if chunk.new_pages:
                entered = chunk.start // self.pool.shape.page_size if recorded else None
                self._tables.update(chunk.slot, chunk.first_page, chunk.new_pages, entered)
            for draw in chunk.draws:
                if self._slots.owners[draw.slot] is not draw.sequence:
                    self._slots.own(draw.slot, draw.sequence, self._config.seed)
                    self._sampler.admit(draw.sequence, draw.slot)
                rows.append(DrawRow(draw.sequence, draw.slot, chunk.start + chunk.count))
        return rows

    def _fill(self, buffer: StepBuffer, plan: StepPlan, rows: list[DrawRow]) -> bool:
        """Write what the step runs and draws; returns whether ids are missing that only the device knows."""
        chunks, host = plan.chunks, buffer.host
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int32)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
        counts = np.array([chunk.count for chunk in chunks], dtype=np.int32)
        buffer.place(self._tables, self.pool.shape.page_size, slots, starts, counts)
        tokens: list[int] = []
        drawn_rows: list[int] = []
        missing: list[tuple[int, int]] = []
        for chunk in chunks:
            known = chunk.sequence.tokens[chunk.start : chunk.start + chunk.count]
            tokens += known
            if len(known) < chunk.count:  # the newest id has not reached the host yet
                missing.append((len(tokens), chunk.slot))
                tokens.append(0)
            drawn_rows += [len(tokens) - 1] * len(chunk.draws)
        host["tokens"][: len(tokens)] = tokens
        host["sources"][: len(tokens)] = -1
        for at, slot in missing:
            host["sources"][at] = slot
        drawn = len(rows)
        draw_slots = np.array([row.slot for row in rows], dtype=np.int32)
        host["rows"][:drawn] = drawn_rows
        host["draw_slots"][:drawn] = draw_slots
        for name in ("temperatures", "top_k", "top_p", "min_p"):
            host[name][:drawn] = getattr(self._slots, name)[draw_slots].view(np.int32)
        host["seeds"][: 2 * drawn] = self._slots.seeds[draw_slots].view(np.int32)
        host["steps"][:drawn] = [row.drawn for row in rows]
        if drawn < buffer.shape.draws:
            buffer.pad_draws(drawn, self._config.max_sequences)
        return bool(missing)

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> Iterator[PromptLogprobs]:
        at = 0
        for chunk in plan.chunks:
            sequence, most = chunk.sequence, chunk.sequence.request.params.prompt_logprobs
            # Row i of the chunk predicts token start + i + 1; the prompt's last row predicts output.
            rows = min(chunk.count, sequence.prompt_length - 1 - chunk.start)
            if most is not None and rows > 0 and sequence.index == 0:
                for first in range(0, rows, PROMPT_LOGPROB_ROWS):
                    count = min(PROMPT_LOGPROB_ROWS, rows - first)
                    token = chunk.start + first + 1
                    targets = np.array(sequence.tokens[token : token + count], dtype=np.int32)
                    logits = self._graphs.head(hidden[at + first : at + first + count]).float()
                    reported = logprobs(logits, send(self._device, ids=targets)["ids"], most)
                    yield PromptLogprobs(sequence, token, LogprobTensors(*reported))
            at += chunk.count
