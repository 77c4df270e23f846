"""Random loads on the scheduler, executed by a stand-in for the device that knows what each page holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata.cache.pages import PageAllocator
from strata.cache.prefix import PrefixTree
from strata.cache.snapshots import Snapshots
from strata.cache.window_pages import WindowPages
from strata.cost.step_times import StepTimes
from strata.engine.args.segments import Content, positions
from strata.engine.plan import NOTHING, StepPlan, Tags
from strata.engine.request import Request, Sequence
from strata.engine.sampling_params import SamplingParams
from strata.engine.scheduling import prompt_budget
from strata.engine.scheduling.config import SchedulerConfig
from strata.engine.scheduling.prompt_budget import StepTarget
from strata.engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.shelf import Carrier, Shelf, StateDevice, WindowDevice
from tests.engine.simulated import EOS, POISON, STOP_ID, STOP_TEXT, VOCABULARY, uncrowded

# Of devices on which a step has room for ten tokens of a prompt, for a few behind a short one, and for none.
TIMES = [
    StepTimes(0.001, 0.004, 0.001, 0.0005, 0.0001, 1e-6, 1e-6),
    StepTimes(0.001, 0.001, 0.0005, 0.0001, 0.0001, 0.0004, 0.0001),
    StepTimes(0.001, 0.001, 0.05, 0.01, 0.01, 0.001, 0.001),
]


# The most ids that a step brings a sequence, and how likely a draft is right.
DRAFTING = st.tuples(st.sampled_from([1, 1, 2, 3, 5]), st.sampled_from([0.0, 0.5, 0.8, 1.0]))


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    """Prompts here have a few tokens, and steps have to be able to divide them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prompt_budget, "MIN_TOKENS", 3)
        yield


@dataclass
class Outstanding:
    plan: StepPlan
    ids: list[int]


class Engine:
    """The scheduler with its device, one step ahead, as the engine's loop runs it."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        config: SchedulerConfig,
        caching: bool,
        ahead: bool,
        windows: tuple[WindowPages, ...] = (),
        snapshots: Snapshots | None = None,
        right: float = 0.5,
        shelf: Shelf | None = None,
    ) -> None:
        self.allocator, self.windows, self.snapshots = PageAllocator(pages, page_size), windows, snapshots
        attached = windows if snapshots is None else (*windows, snapshots)
        self.prefix = PrefixTree(self.allocator, attached) if caching else None
        self.scheduler = Scheduler(config, self.allocator, self.prefix, windows, snapshots, shelf)
        self.device = WindowDevice(page_size, windows, right)
        if snapshots is not None:
            self.device = StateDevice(page_size, windows, config.max_sequences, right)
        self.carrier = Carrier(self.device, shelf) if shelf is not None else None
        self.ahead = ahead
        self.outputs: dict[int, list[int]] = {}  # by sequence
        self.outstanding: Outstanding | None = None

    def fits(self, tokens: int) -> bool:
        """Whether a sequence that keeps so many tokens could run alone."""
        pages = self.allocator.pages_for(tokens)
        windows = all(min(pages, window.max_pages + 1) <= window.books.num_pages for window in self.windows)
        return pages <= self.allocator.num_pages and windows

    def step(self) -> None:
        if not self.ahead:
            self.complete()
        plan = self.scheduler.schedule()
        before = self.outstanding
        if plan is None:
            assert before is not None or not self.scheduler.has_work, "work is left and nothing runs"
            self.outstanding = None
        else:
            assert (0 if self.carrier else 1) <= plan.tokens <= self.scheduler.config.max_tokens
            sent = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
            assert sent == plan
            self.outstanding = Outstanding(plan, self.device.launch(sent))
        self._scribble()
        self._take(before)

    def _scribble(self) -> None:
        """What lies on pages that nobody holds is lost."""
        groups = zip((window.books for window in self.windows), self.device.pages_of, strict=True)
        for books, contents in ((self.allocator, self.device.pages), *groups):
            for page in [books.allocate() for _ in range(books.free)]:
                contents.pop(page, None)
                books.release(page)

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
        while self.carrier is not None and self.carrier.coming:
            self.scheduler.complete(NOTHING, [], self.carrier.arrive())
        return steps

    def _take(self, before: Outstanding | None) -> None:
        if before is None:
            return
        self.device.learnt(before.plan, before.ids)
        arrived = self.carrier.arrive() if self.carrier is not None else ()
        for update in self.scheduler.complete(before.plan, before.ids, arrived):
            sequence = update.sequence
            assert sequence.finish_reason == update.finish_reason
            if not update.tokens:
                assert sequence.finish_reason == "error"
                assert not sequence.pages
                continue
            assert sequence.tokens[-len(update.tokens) :] == update.tokens
            self._read(sequence, update.tokens)

    def _read(self, sequence: Sequence, tokens: list[int]) -> None:
        """Take ids up to a stop string."""
        params, outputs = sequence.request.params, self.outputs.setdefault(sequence.id, [])
        for token in tokens:
            outputs.append(token)
            if token == STOP_TEXT and params.detokenize and len(outputs) >= params.min_tokens:
                self.scheduler.finish(sequence, "stop", "text")
                return


def of_loads(**own: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Sizes of an engine, with those that a kind of load has of its own."""
    common: dict[str, st.SearchStrategy[Any]] = {
        "page_size": st.sampled_from([1, 2, 3, 4, 8]),
        "tokens": st.integers(12, 80),
        "all_tokens": st.just(True),
        "slots": st.integers(1, 6),
        "budget": st.integers(1, 40),
        "caching": st.booleans(),
        "ahead": st.booleans(),
        "drafting": DRAFTING,
    }
    return st.fixed_dictionaries(common | own)


class Load(RuleBasedStateMachine):
    """Requests come, go and are aborted while steps run; whatever happens, each stream is the uncrowded one."""

    longest = 48

    @initialize(given=of_loads(times=st.sampled_from([None, None, *TIMES])))
    def start(self, given: dict[str, Any]) -> None:
        self.begin(given)

    def begin(self, given: dict[str, Any], **kinds: Any) -> None:
        """kinds: pages of windows, snapshots or a shelf, as `Engine` takes them."""
        draws, right = given["drafting"]
        target = StepTarget(0.020, given["times"]) if given.get("times") else None
        config = SchedulerConfig(given["slots"], given["budget"], self.longest, target=target, draws=draws)
        size = given["page_size"]
        pages = max(1, given["tokens"] // size) if given["all_tokens"] else 1000
        self.engine = Engine(pages, size, config, given["caching"], given["ahead"], right=right, **kinds)
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
        tags=st.sampled_from([None, None, Tags(), Tags(adapter="a"), Tags(draft="a"), Tags(weights="2")]),
        content=st.sampled_from([0, 0, 0, 2, 9]),
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
        tags: Tags | None,
        content: int,
        flags: tuple[bool, bool, bool],
        poison: bool,
    ) -> None:
        ignore_eos, stop_text, scored = flags
        source = random.Random(seed)
        shared = random.Random(seed % 2).choices(range(3, VOCABULARY), k=common)
        image = [Content(content, bytes([seed % 2]))] if content else []
        prompt = [*positions([shared, *image, source.choices(range(3, VOCABULARY), k=own)])]
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
        ends, arrival = frozenset([EOS]), float(number)
        request = Request(str(number), tuple(prompt), params, priority, arrival, salt, ends, tags=tags)
        limit = min(len(prompt) + (max_tokens or self.longest), self.longest)
        if not self.engine.fits(limit - 1):
            with pytest.raises(ValueError, match="KV pages"):
                self.engine.scheduler.add(request)
            return
        added = self.engine.scheduler.add(request)
        assert [sequence.index for sequence in added] == list(range(n))
        self.sequences += added
        self.engine.device.asked.update((sequence.id, (sequence.index, sequence.extra_key)) for sequence in added)

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
        for books in (engine.allocator, *(window.books for window in engine.windows)):
            assert books.free + books.idle == books.num_pages, "a page leaked"
        assert engine.scheduler.running == engine.scheduler.waiting == 0
        for sequence in self.sequences if engine.prefix is not None else ():
            cached = engine.prefix.match(sequence.tokens, sequence.extra_key)
            assert engine.device.holds(cached, sequence.tokens, sequence.extra_key), "a page of other tokens is cached"
            engine.allocator.release_all(cached)
        if engine.prefix is not None and not self.aborted:  # nobody has learnt what an aborted request computed
            assert not engine.device.poisoned(engine.prefix)
        for sequence in self.sequences:
            outputs, finish_reason, stop_reason = uncrowded(sequence.request, sequence.index, self.longest)
            assert sequence.finished
            found = engine.outputs.get(sequence.id, [])
            if sequence.finish_reason == "abort":
                assert sequence.request.id in self.aborted
                assert found == outputs[: len(found)]
            else:
                assert found == outputs
                assert (sequence.finish_reason, sequence.stop_reason) == (finish_reason, stop_reason)


TestLoad = Load.TestCase
TestLoad.settings = settings(
    max_examples=400, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
