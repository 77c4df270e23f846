"""Random loads on the scheduler, executed by a stand-in for the device that knows what each page holds.

Its "model" is a function of all tokens before, so a stream of ids is right only if every step read what it should.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.engine.plan import StepPlan
from strata.engine.request import Request, Sequence
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduler import Scheduler, SchedulerConfig

VOCABULARY = 23
EOS = 0
STOP_ID = 1
STOP_TEXT = 2  # ends the sequence as a stop string would: found by the host after `complete`
POISON = VOCABULARY  # from this prompt token on all keys and values are NaN, and no id can be drawn


def next_token(tokens: list[int], index: int) -> int:
    return zlib.crc32(bytes([index, *tokens])) % VOCABULARY


def uncrowded(request: Request, index: int, longest: int) -> tuple[list[int], str, int | str | None]:
    """Outputs, finish reason and stop reason of one sample, from the definitions alone."""
    params, tokens, outputs = request.params, list(request.prompt), []
    if POISON in tokens:
        return [], "error", None
    while True:
        token = next_token(tokens, index)
        tokens.append(token)
        outputs.append(token)
        if len(outputs) >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return outputs, "stop", None
            if token in (params.stop_token_ids or ()):
                return outputs, "stop", token
            if token == STOP_TEXT and params.detokenize:
                return outputs, "stop", "text"
        if len(outputs) == params.max_tokens or len(tokens) == longest:
            return outputs, "length", None


class Device:
    """Executes plans in the order of their launch, as a stream does."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.tables: dict[int, dict[int, int]] = {}
        self.newest: dict[int, int] = {}
        self.pages: dict[int, dict[int, tuple[int, int, str]]] = {}
        self.truth: dict[int, list[int]] = {}

    def launch(self, plan: StepPlan) -> list[int]:
        assert plan.tokens == sum(chunk.count for chunk in plan.chunks)
        slots = [chunk.slot for chunk in plan.chunks]
        assert len(set(slots)) == len(slots), "two chunks in a slot"
        kinds = [chunk.count == 1 and len(chunk.draws) == 1 for chunk in plan.chunks]
        assert kinds == sorted(kinds, reverse=True), "a decode after other chunks"
        for source, target in plan.copies:
            self.pages[target] = dict(self.pages[source])
        written: set[tuple[int, int]] = set()
        writers: dict[int, int] = {}
        for chunk in plan.chunks:
            table = {} if chunk.first_page == 0 and chunk.new_pages else self.tables[chunk.slot]
            table.update(enumerate(chunk.new_pages, chunk.first_page))
            self.tables[chunk.slot] = table
            for position in range(chunk.start, chunk.start + chunk.count):
                known = chunk.sequence.tokens
                token = known[position] if position < len(known) else self.newest[chunk.slot]
                place = (table[position // self.page_size], position % self.page_size)
                assert place not in written, "two tokens in one place"
                written.add(place)
                self.pages.setdefault(place[0], {})[place[1]] = (token, position, chunk.sequence.request.salt)
                assert writers.setdefault(place[0], chunk.slot) == chunk.slot, "two chunks write in a page"
        ids = []
        for chunk in plan.chunks:
            pages = [self.tables[chunk.slot][page] for page in range(-(-(chunk.start + chunk.count) // self.page_size))]
            assert all(writers.get(page, chunk.slot) == chunk.slot for page in pages), (
                "a chunk reads what another one of its step writes"
            )
            truth = self.truth.setdefault(chunk.sequence.id, list(chunk.sequence.request.prompt))
            end = chunk.start + chunk.count
            read = [
                self.pages[self.tables[chunk.slot][position // self.page_size]][position % self.page_size]
                for position in range(end)
            ]
            salt = chunk.sequence.request.salt
            assert read == [(token, position, salt) for position, token in enumerate(truth[:end])]
            assert not chunk.draws or end == len(truth), "a draw before the last token, or beyond it"
            for sequence, slot in chunk.draws:
                token = -1 if POISON in truth[:end] else next_token(truth[:end], sequence.index)
                self.newest[slot] = max(token, 0)
                ids.append(token)
        for sequence, slot in plan.draws:
            self.truth.setdefault(sequence.id, list(sequence.request.prompt)).append(self.newest[slot])
        return ids

    def poisoned(self, pages: Iterable[int]) -> list[int]:
        return [page for page in pages if any(token == POISON for token, *_ in self.pages[page].values())]


@dataclass
class Outstanding:
    plan: StepPlan
    ids: list[int]


class Engine:
    """The scheduler with its device, one step ahead, as the engine's loop runs it."""

    def __init__(self, pages: int, page_size: int, config: SchedulerConfig, caching: bool, ahead: bool) -> None:
        self.allocator = PageAllocator(pages, page_size)
        self.prefix = PrefixTree(self.allocator) if caching else None
        self.scheduler = Scheduler(config, self.allocator, self.prefix)
        self.device = Device(page_size)
        self.ahead = ahead
        self.outstanding: Outstanding | None = None
        self.first_run: list[Sequence] = []

    def step(self) -> None:
        if not self.ahead:
            self.complete()
        plan = self.scheduler.schedule()
        before = self.outstanding
        if plan is None:
            assert before is not None or not self.scheduler.has_work, "work is left and nothing runs"
            self.outstanding = None
        else:
            assert 0 < plan.tokens <= self.scheduler.config.max_tokens
            self.first_run += [chunk.sequence for chunk in plan.chunks if chunk.sequence not in self.first_run]
            self.outstanding = Outstanding(plan, self.device.launch(plan))
        self._take(before)

    def complete(self) -> None:
        before, self.outstanding = self.outstanding, None
        self._take(before)

    def run(self) -> int:
        """Step until nothing is left; returns the number of steps."""
        steps = 0
        while self.scheduler.has_work or self.outstanding is not None:
            self.step()
            steps += 1
            assert steps < 20_000, "no end in sight"
        return steps

    def _take(self, before: Outstanding | None) -> None:
        if before is None:
            return
        for update in self.scheduler.complete(before.plan, before.ids):
            sequence = update.sequence
            assert sequence.finish_reason == update.finish_reason
            if update.token is None:
                assert sequence.finish_reason == "error"
                assert not sequence.pages
                continue
            assert sequence.tokens[-1] == update.token
            params = sequence.request.params
            long_enough = len(sequence.outputs) >= params.min_tokens
            if update.token == STOP_TEXT and params.detokenize and long_enough:
                self.scheduler.finish(sequence, "stop", "text")


class Load(RuleBasedStateMachine):
    """Requests come, go and are aborted while steps run; whatever happens, each stream is the uncrowded one."""

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 8]),
        tokens=st.integers(12, 80),
        slots=st.integers(1, 6),
        budget=st.integers(1, 40),
        caching=st.booleans(),
        ahead=st.booleans(),
    )
    def start(self, page_size: int, tokens: int, slots: int, budget: int, caching: bool, ahead: bool) -> None:
        self.longest = 48
        config = SchedulerConfig(slots, budget, self.longest)
        self.engine = Engine(max(1, tokens // page_size), page_size, config, caching, ahead)
        self.sequences: list[Sequence] = []
        self.aborted: set[str] = set()

    @rule(
        seed=st.integers(0, 2**16),
        common=st.integers(0, 20),
        own=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3, 5]),
        max_tokens=st.sampled_from([None, 1, 2, 5, 20]),
        min_tokens=st.sampled_from([0, 0, 1]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from(["", "", "other"]),
        flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        poison=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        seed: int,
        common: int,
        own: int,
        n: int,
        max_tokens: int | None,
        min_tokens: int,
        priority: int,
        salt: str,
        flags: tuple[bool, bool, bool],
        poison: bool,
    ) -> None:
        ignore_eos, stop_text, scored = flags
        source = random.Random(seed)
        shared = random.Random(seed % 2).choices(range(3, VOCABULARY), k=common)
        prompt = [*shared, *source.choices(range(3, VOCABULARY), k=own)]
        if poison:
            prompt[seed % len(prompt)] = POISON
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=[STOP_ID] if seed % 3 else None,
            detokenize=stop_text,
            prompt_logprobs=0 if scored and seed % 5 == 0 else None,
        )
        number = len(self.sequences)
        request = Request(str(number), tuple(prompt), params, priority, float(number), salt, frozenset([EOS]))
        limit = min(len(prompt) + (max_tokens or self.longest), self.longest)
        fits = -(-(limit - 1) // self.engine.allocator.page_size) <= self.engine.allocator.num_pages
        if not fits:
            with pytest.raises(ValueError, match="KV pages"):
                self.engine.scheduler.add(request)
            return
        added = self.engine.scheduler.add(request)
        assert [sequence.index for sequence in added] == list(range(n))
        self.sequences += added

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 2**16), between=st.booleans())
    def abort(self, which: int, between: bool) -> None:
        request_id = self.sequences[which % len(self.sequences)].request.id
        if between:
            self.engine.complete()
        ended = self.engine.scheduler.abort(request_id)
        if ended:
            self.aborted.add(request_id)
        assert all(sequence.finish_reason == "abort" and not sequence.pages for sequence in ended)

    @invariant()
    def books_agree(self) -> None:
        self.engine.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        engine.scheduler.check()
        assert engine.allocator.free + engine.allocator.idle == engine.allocator.num_pages, "a page leaked"
        assert engine.scheduler.running == engine.scheduler.waiting == 0
        if engine.prefix is not None and not self.aborted:  # nobody has learnt what an aborted request computed
            assert not engine.device.poisoned(engine.prefix)
        for sequence in self.sequences:
            outputs, finish_reason, stop_reason = uncrowded(sequence.request, sequence.index, self.longest)
            assert sequence.finished
            if sequence.finish_reason == "abort":
                assert sequence.request.id in self.aborted
                assert sequence.outputs == outputs[: len(sequence.outputs)]
            else:
                assert sequence.outputs == outputs
                assert (sequence.finish_reason, sequence.stop_reason) == (finish_reason, stop_reason)


TestLoad = Load.TestCase
TestLoad.settings = settings(
    max_examples=400, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
