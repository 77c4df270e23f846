"""Executes step plans on one device: builds the batch, runs the graph, samples, and keeps new ids on the device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from strata.cache.block_tables import BlockTables, table_pages
from strata.cache.pool import KVPool
from strata.cache.staging import Staging, send
from strata.cache.state_pool import StatePool
from strata.cache.tables import BufferShape, StepBuffer
from strata.engine.captured_steps import CapturedSteps, draw_inputs, step_inputs
from strata.engine.engine_config import EngineSizes
from strata.engine.grammars.grammar import Masks, MasksUnderWay
from strata.engine.ledger import PROMPT_LOGPROB_ROWS
from strata.engine.loop import StepObserver
from strata.engine.plan import PlanArrays, StepPlan, UndrawnStep
from strata.engine.program.inputs import DrawStep
from strata.engine.program.program import StepChoice, StepProgram
from strata.engine.program.shape import StepShape
from strata.engine.program.sizes import StepSizes
from strata.engine.ranks.prefill_context_parallel import RankStep
from strata.engine.sampler import DrawRow, LogprobTensors, Sampler
from strata.engine.steps.groups import WindowSteps
from strata.engine.steps.slots import SlotState, meets
from strata.graph.cudagraph import CudaGraphs, CudaGraphStore
from strata.kernels.sampling.sampling import likeliest
from strata.models.config import ModelConfig


@dataclass(frozen=True)
class ScoredPrompt:
    """Log-probabilities of prompt tokens [first, first + rows) of a sequence, by its id, each given those before it."""

    sequence: int
    first: int
    tensors: LogprobTensors


@dataclass(frozen=True)
class Launched:
    """A step that is under way. `wait` blocks until the host has its ids and log-probabilities.

    masked: some rows drew under a mask. If a matcher is in its error state, the id of its sequence means nothing.
    size: of the CUDA graph that it replays from ids to ids, None if it does not. watch: waits until what it is given
    says that the step has ended, and raises if that cannot be any more; None where no other rank takes part.
    """

    plan: StepPlan
    ids: Tensor
    done: torch.cuda.Event | None = None
    logprobs: LogprobTensors | None = None
    prompt_logprobs: tuple[ScoredPrompt, ...] = ()
    masked: bool = False
    size: BufferShape | None = None
    arrived: tuple[()] = ()
    watch: Callable[[Callable[[], bool]], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether `wait` would not block."""
        return self.done is None or self.done.query()

    def wait(self) -> list[int]:
        """The new ids in the order of the plan's draws. Raises what `watch` does."""
        if self.watch is not None:
            self.watch(lambda: self.ended)
        if self.done is not None:
            self.done.synchronize()
        ids: list[int] = self.ids.tolist()
        return ids


@dataclass(frozen=True)
class Undrawn(UndrawnStep):
    """A step whose logits are under way.

    bucket: whose captured graph draws from the logits, None if none does; it can where no row is special.
    complete: for each row, whether its grammar allows nothing but an end; empty without grammars.
    """

    arrays: PlanArrays
    buffer: StepBuffer
    logits: Tensor
    bucket: BufferShape | None
    prompt_logprobs: tuple[ScoredPrompt, ...] = ()
    complete: tuple[bool, ...] = ()
    masks: MasksUnderWay | None = None


class Runner:
    """Owns the KV pool, the block tables and each slot's newest id; learns of sequences from plans alone.

    Steps that fit into a size for which `capture` has made a CUDA graph replay that; others are launched eagerly.
    program: what chooses what a step runs. observer: for benchmarks, None while nothing is measured.
    """

    def __init__(
        self,
        program: StepProgram,
        sizes: EngineSizes,
        config: ModelConfig,
        kept: Sequence[KVPool],
        device: torch.device,
        mask_ids: int,
        states: StatePool | None = None,
        stages: int = 1,
    ) -> None:
        """config: of the model, of a rank its own. kept: a pool for each of the groups of `sizes`. mask_ids: how many
        ids a mask of a grammar tells of. states: of layers that keep a fixed state. stages: of the pipeline that this
        is one of; if there are several, `learn` tells what has been drawn."""
        slots = sizes.max_sequences
        self.pool = kept[0]
        self._states, self._stages, self._heads, self._device = states, stages, config.num_heads, device
        self.program = program.replaying(StepSizes())  # until there are CUDA graphs
        self._tables = BlockTables(slots, table_pages(sizes.max_length, self.pool.shape.page_tokens), device)
        first, *more = sizes.groups
        # For which a CPU plans its attention. What attends to keys that ranks divide follows no plan.
        attended = first.layers if self.pool.shape.kept.ranks == 1 else ()
        self._attended = frozenset(config.windows[layer] for layer in attended)
        windows = [(pool, group.window) for pool, group in zip(kept[1:], more, strict=True) if group.window is not None]
        self._windows: WindowSteps | None = None
        if windows or first.window is not None:
            self._windows = WindowSteps((self.pool, self._tables), windows, first.window is not None, device)
        self._slots = SlotState(slots)
        self._sampler = Sampler(slots, sizes.max_length, device, program.part)
        self._masks = Masks(mask_ids, slots, device)
        # One id more than slots: padding rows of a CUDA graph read and write the last one.
        self._newest = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        shapes = [BufferShape(sizes.max_tokens, slots + 1, slots, groups=len(kept))]
        if program.division is not None:
            shapes.append(program.division.largest(sizes.max_tokens, slots))
        largest = max(replace(shape, tags=True).size for shape in shapes)
        # So that a step can be prepared while those before it have not left their buffers.
        steps, pinned = stages + 1, device.type == "cuda"
        self._staging = [Staging(largest, device) for _ in range(steps)]
        self._returns = [torch.empty(slots, dtype=torch.int32, pin_memory=pinned) for _ in range(steps)]
        self._rank = 0 if program.division is None else program.division.index
        self._captured: CapturedSteps | None = None
        self.observer: StepObserver | None = None

    @torch.inference_mode()
    def capture(
        self, buckets: StepSizes, *, all_of_them: bool = False, kernels_are_ready: bool = False
    ) -> CapturedSteps:
        """Capture CUDA graphs for steps of these sizes, the largest first so that the others fit in its memory.

        all_of_them: a size that the memory does not suffice for is an error, not `lacking`. kernels_are_ready: all
        variants of own kernels, so that few sizes have to be run before they are captured.
        """
        given = (self.program, self.pool, self._tables, self._newest, self._staging, self._captured_graphs())
        more = self._heads, self._windows, self._states, self._rank
        captured = CapturedSteps(*given, *more, kernels_are_ready=kernels_are_ready)
        for bucket in sorted(buckets, key=lambda shape: shape.size, reverse=True):
            captured.capture(bucket, may_lack=not all_of_them)
        torch.cuda.empty_cache()  # what the first runs left on a stream that nothing else uses
        self._captured = captured
        self.program = self.program.replaying(StepSizes(captured.sizes, buckets.prompt_keys))
        for size in captured.sizes:
            self.program.replayed(size)  # looked up now, when no step waits for it
        return captured

    def _captured_graphs(self) -> CudaGraphStore:
        return CudaGraphs()

    def learn(self, drawn: Iterable[tuple[int, int]]) -> None:
        """Take (slot, id) that the last of several stages has drawn, before steps that run them are launched."""
        for slot, id in drawn:
            self._slots.newest[slot] = id

    @torch.inference_mode()
    def launch(self, plan: StepPlan, room: StepShape | None = None) -> Launched | Undrawn:
        """Start a step; its ids come later. Pages and slots of the plan may be reused by the next plan at once.

        A step with constrained rows has to be drawn before the next is launched. room: of the steps that other ranks
        start now, where each has sequences of its own; the plan may have no chunk then.
        """
        self._staging.append(self._staging.pop(0))
        self._returns.append(self._returns.pop(0))
        self._copy_before(plan)
        arrays = PlanArrays(plan)
        self._admit(plan)
        choice = self.program.choose(self._shape(plan, arrays, room))
        # A share does not tell of what other ranks decode; ranks that divide keys have tables of their own.
        alike = choice.shape.share is None and self.pool.shape.kept.ranks == 1
        self._enter_pages(plan, captured=choice.size is not None and alike)
        step = choice.shape.share or arrays
        if choice.size is None:
            if self._captured is not None and choice.variant.captured:
                self._captured.count_uncaptured(choice.shape)
            launched = self._launch_eager(plan, step, choice, room)
        else:
            launched = self._launch_captured(plan, step, choice.size)
        if self._states is not None:
            self._states.copy(plan.states_after)
        if self.observer is not None and isinstance(launched, Launched):
            self.observer.end()
        return launched

    def mask(self, step: Undrawn, matchers: Sequence[LLMatcher | None]) -> Undrawn:
        """Begin with the masks of a step; matchers: of each draw, None where it is free. They must know all ids before
        it, and be left alone until it is drawn."""
        complete = tuple(matcher is not None and matcher.is_stopped() for matcher in matchers)
        return replace(step, complete=complete, masks=self._masks.start(matchers))

    @torch.inference_mode()
    def draw(self, step: Undrawn) -> Launched:
        """Sample a step that has its masks; it has none if all that needed them have ended."""
        launched = self._draw(step, step.masks.send(self._device) if step.masks is not None else None)
        if self.observer is not None:
            self.observer.end()
        return replace(launched, masked=step.masks is not None)

    def settle(self) -> None:
        """Wait until nothing of any step is under way, so that all buffers may be filled again."""
        self._masks.settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def ids_digest(self) -> int:
        """Tells the newest ids of all slots apart from others, for ranks that must have drawn the same."""
        return zlib.crc32(self._newest[:-1].cpu().numpy().tobytes())

    def _copy_before(self, plan: StepPlan) -> None:
        if self._states is not None:
            self._states.copy(plan.states_before)
        if plan.copies and not (self._windows is not None and self._windows.only_windows):
            self.pool.copy_pages(plan.copies)
        if self._windows is not None:
            self._windows.copy_pages(plan)

    def _send(self, buffer: StepBuffer, plan: StepPlan) -> None:
        if self.observer is not None:
            self.observer.begin(plan)
        self._tables.send()
        if self._windows is not None:
            self._windows.send()
        buffer.send()

    def _shape(self, plan: StepPlan, arrays: PlanArrays, room: StepShape | None) -> StepShape:
        if room is not None:
            return room._replace(step=arrays)
        return StepShape.of(arrays, scored=self._slots.scores(plan), tagged=self._slots.tags_any(plan))

    def _launch_captured(self, plan: StepPlan, arrays: PlanArrays, bucket: BufferShape) -> Launched | Undrawn:
        assert self._captured is not None
        buffer = self._captured.buffer(bucket, self._staging[0])
        self._fill(buffer, arrays)
        if bucket.tokens != bucket.sequences:
            buffer.divide(arrays.counts, captured=True)
        self._send(buffer, plan)
        logits = self._captured.run(bucket)
        draws = len(arrays.drawn)
        if not draws:
            return self._finish(plan, self._newest[:0])
        undrawn = Undrawn(plan, arrays, buffer, logits[:draws], None if self._special(plan, arrays) else bucket)
        return undrawn if meets(self._slots.constrained, arrays.drawn) else self._draw(undrawn)

    def _launch_eager(
        self, plan: StepPlan, arrays: PlanArrays, choice: StepChoice, room: StepShape | None
    ) -> Launched | Undrawn:
        program, variant = self.program, choice.variant
        draws, share = len(arrays.drawn), choice.shape.share
        if room is not None:
            shape, longest = room.buffer(plan), room.longest(plan)
        else:
            groups = 1 if self._windows is None else self._windows.groups
            shape = BufferShape(plan.tokens, len(plan.chunks), draws, groups=groups) if share is None else share.shape
            longest = 1 if arrays.are_decodes else int(arrays.counts.max(initial=1))
        if choice.shape.tagged:
            shape = replace(shape, tags=True)
        buffer = StepBuffer(shape, self._staging[0], self._staging[0].target(shape.size))
        missing = self._fill(buffer, arrays)
        parts = buffer.divide(arrays.counts, captured=False) if longest > 1 else None
        self._send(buffer, plan)
        page_size, tables = self.pool.shape.page_tokens, self._tables.on_device
        if choice.library:
            assert parts is not None
            assert self._captured is not None
            given = step_inputs(buffer, tables, page_size, self._newest, self._rank)
            tokens, tables, parts = self._captured.chunk_queries(given, parts)
        else:
            inputs = program.inputs(choice, missing=missing)
            columns = tables[:, : -(-int(arrays.ends.max(initial=1)) // page_size)]
            tokens, tables = inputs.forward(step_inputs(buffer, columns, page_size, self._newest, self._rank))
        others = () if self._windows is None else self._windows.tables(buffer, tables.shape[1])
        batch = buffer.batch(self.pool, tables, tokens, longest, self._attended, parts, others, self._states)
        prompt_logprobs: tuple[ScoredPrompt, ...] = ()
        head = program.head
        if choice.shape.scored and head is not None:
            hidden = (variant.hidden or program.hidden).forward(batch)
            prompt_logprobs = tuple(self._prompt_logprobs(plan, hidden))
            logits = head.forward(hidden.index_select(0, buffer.tensors["rows"]))
        else:
            logits = variant.graph.forward(batch, *(buffer.tensors[name] for name in variant.inputs))
        if not draws:
            return self._finish(plan, self._newest[:0], None, prompt_logprobs)
        undrawn = Undrawn(plan, arrays, buffer, logits[:draws], None, prompt_logprobs)
        return undrawn if meets(self._slots.constrained, arrays.drawn) else self._draw(undrawn)

    def _special(self, plan: StepPlan, arrays: PlanArrays) -> bool:
        """Whether any row of a step takes the long way of sampling."""
        return bool(plan.banned) or meets(self._slots.special, arrays.drawn)

    def _draw(self, step: Undrawn, masks: tuple[Tensor, Tensor] | None = None) -> Launched:
        """Sample a step's rows; masks: see `apply_bitmask`. Of a stage before the last there is nothing to sample."""
        if self.program.head is None:
            return self._finish(step.plan, self._newest[:0])
        plan, buffer, logits, slots = step.plan, step.buffer, step.logits, step.arrays.drawn
        draws = len(slots)
        reported = None
        special = step.bucket is None and self._special(plan, step.arrays)
        if masks is not None and not special:
            self._sampler.mask(logits, masks)
        filtered = meets(self._slots.filtered, slots)
        if step.bucket is not None:
            assert self._captured is not None
            return replace(self._finish(plan, self._captured.draw(step.bucket, filtered)[:draws]), size=step.bucket)
        targets = buffer.tensors["draw_slots"][:draws]
        greedy = not special and not meets(self._slots.sampled, slots)
        if greedy and self._device.type == "cpu" and self.program.part is None:
            ids = likeliest(logits)
            self._newest[targets] = ids
        else:
            inputs = draw_inputs(buffer, draws)
            if special:
                ids, reported = self._sampler.draw(logits, self._rows(step), inputs, filtered, masks)
                self._newest[targets] = ids
            else:
                graph = self.program.draw_filtered if filtered else self.program.draw
                ids, _ = graph.forward(DrawStep(logits, inputs, self._newest, targets))
        return self._finish(plan, ids, reported, step.prompt_logprobs)

    def _rows(self, step: Undrawn) -> list[DrawRow]:
        banned: dict[int, tuple[int, ...]] = {}
        for slot, id in step.plan.banned:
            banned[slot] = (*banned.get(slot, ()), id)
        slots, lengths = step.arrays.drawn, step.arrays.draw_lengths.tolist()
        complete = step.complete or (False,) * len(slots)
        drawn = zip(slots, lengths, complete, strict=True)
        return [DrawRow(self._slots[slot], length, banned.get(slot, ()), ends) for slot, length, ends in drawn]

    def _finish(
        self,
        plan: StepPlan,
        ids: Tensor,
        reported: LogprobTensors | None = None,
        prompt_logprobs: tuple[ScoredPrompt, ...] = (),
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

    def _admit(self, plan: StepPlan) -> None:
        """Bring the slots up to the plan."""
        self._slots.learn(plan)
        for sequence in plan.new:
            self._sampler.admit(sequence)

    def _enter_pages(self, plan: StepPlan, captured: bool) -> None:
        """Bring the block tables up to the plan; the page of a single token is entered by a captured step itself."""
        if self._windows is not None:
            self._windows.enter_pages(plan, captured)
            if self._windows.only_windows:
                return
        for chunk in plan.chunks:
            if chunk.new_pages:
                entered = chunk.start // self.pool.shape.page_size if captured and chunk.count == 1 else None
                self._tables.update(chunk.slot, chunk.first_page, chunk.new_pages, entered)

    def _fill(self, buffer: StepBuffer, arrays: PlanArrays) -> bool:
        """Write what the step runs and draws; returns whether ids are missing that only the device knows."""
        host, state, slots, tokens, shape = buffer.host, self._slots, arrays.slots, arrays.tokens, self.pool.shape
        buffer.place(self._tables, shape.page_size, slots, arrays.starts, arrays.counts, shape.kept)
        if self._windows is not None:
            self._windows.place(buffer, slots, arrays.starts, arrays.counts)
        drawn_here = arrays.starts >= state.known[slots]  # its one token is what its slot drew last
        all_drawn_here = bool(drawn_here.all())
        host["tokens"][:tokens] = 0
        if self._stages > 1:
            host["sources"][:tokens] = -1
            host["tokens"][arrays.last_rows[drawn_here]] = state.newest[slots[drawn_here]]
        elif arrays.are_decodes and all_drawn_here:
            host["sources"][:tokens] = slots
        else:
            host["sources"][:tokens] = -1
            host["sources"][arrays.last_rows[drawn_here]] = slots[drawn_here]
        if not all_drawn_here:
            for index in np.flatnonzero(~drawn_here).tolist():
                start, count, row = (int(field[index]) for field in (arrays.starts, arrays.counts, arrays.last_rows))
                host["tokens"][row + 1 - count : row + 1] = state[int(slots[index])].tokens[start : start + count]
        state.place_draws(host, arrays)
        if buffer.shape.tags:
            state.place_tags(host, slots)
        if isinstance(arrays, RankStep):
            arrays.place(buffer, self._tables, self.pool.shape.page_size)
        if len(arrays.drawn) < buffer.shape.draws:
            buffer.pad_draws(len(arrays.drawn), len(self._newest) - 1)
        return self._stages == 1 and (all_drawn_here or bool(drawn_here.any()))

    def _prompt_logprobs(self, plan: StepPlan, hidden: Tensor) -> Iterator[ScoredPrompt]:
        head, at = self.program.head, 0
        assert head is not None
        for chunk in plan.chunks:
            sequence = self._slots[chunk.slot]
            most = sequence.prompt_logprobs
            # Row i of the chunk predicts token start + i + 1; the prompt's last row predicts output.
            rows = min(chunk.count, sequence.prompt_length - 1 - chunk.start)
            if most is not None and rows > 0:
                for first in range(0, rows, PROMPT_LOGPROB_ROWS):
                    count = min(PROMPT_LOGPROB_ROWS, rows - first)
                    token = chunk.start + first + 1
                    targets = np.array(sequence.tokens[token : token + count], dtype=np.int32)
                    logits = head.forward(hidden[at + first : at + first + count]).float()
                    reported = self._sampler.logprobs(logits, send(self._device, ids=targets)["ids"], most)
                    yield ScoredPrompt(sequence.id, token, reported)
            at += chunk.count
