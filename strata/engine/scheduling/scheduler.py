"""Which sequences run how many tokens in which pages at each step. Values in, values out; nothing here runs a model.

Continuous batching (Orca, Yu et al. 2022) under a token budget, with chunked prefill beside decode (Sarathi-Serve,
Agrawal et al. 2024) and preemption by recompute (vLLM, Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING

from strata.cache.pages import NONE_SHARED, PageAllocator
from strata.cache.prefix import Elsewhere, PrefixTree
from strata.cache.snapshots import Snapshots
from strata.cache.window_pages import WindowPages
from strata.engine.plan import REJECTED, Chunk, Draw, StepPlan, TransferEnd
from strata.engine.request import NO_SLOT, Request, Sequence, Status, Update, new_sequence
from strata.engine.scheduling.builder import PlanBuilder
from strata.engine.scheduling.config import NOBODY, Holdup, SchedulerConfig, Statistics, Waiting
from strata.engine.scheduling.growth import Admission, DecodeRuns, Decodes, Growth, Windows
from strata.engine.scheduling.prefixes import Prefixes
from strata.engine.scheduling.queues import Queues, order
from strata.engine.scheduling.states import States

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Scheduler:
    """Owns requests, sequences, slots and pages, and decides what each step runs.

    Sequences are ordered by arrival, shifted by priority, then by id. Pages and tokens go to the first of them, waiting
    ones are admitted in this order, and when pages run out the last is preempted: so the first one always gets on. All
    pages of what a sequence has to prefill are taken at its admission.

    No chunk of a step reads what another chunk of it writes. A sequence that could begin with pages that a step fills
    waits for the next one and finds them; meanwhile others may go before it if they take nothing that it needs. One
    that waits for pages from elsewhere leaves all to others.

    `schedule` may be called while one plan is outstanding: then the newest id of each of its sequences is on the device
    only, and of those with drafts how many ids are new. With several stages more may be: a sequence whose id is under
    way is in no further plan, and a plan decodes for its share of those that run, so that all stages have work. Plans
    are launched and completed in order, each launched before the next call; one that is not needs `reset`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PageAllocator,
        prefix: PrefixTree | None,
        windows: Listed[WindowPages] = (),
        snapshots: Snapshots | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """`prefix` None turns prefix caching off. windows: of layers that do not keep all tokens, which the tree has as
        attached; pages of a sequence's tokens in them are taken chunk by chunk. snapshots: where layers have a fixed
        state, attached too. elsewhere: what is found there comes into the pool; None: nothing ever is."""
        self.config = config
        self.statistics = Statistics()
        self._pages = pages
        self._windows = Windows(windows) if windows else None
        self._states = States(pages.page_size, prefix, snapshots)
        self._prefixes = Prefixes(pages, prefix, windows, self._states, elsewhere)
        self._requests: dict[str, list[Sequence]] = {}
        self._sequences: dict[int, Sequence] = {}  # all that are unfinished, by id
        self._queues = Queues(min(config.max_sequences, config.max_tokens))
        self._admission = Admission(pages, self._prefixes, self._queues, self._windows)
        self._growth = Growth(pages, self._prefixes, self._queues, self._windows, self._preempt)
        self._decodes = Decodes(pages, self._queues, self._growth, self._windows, self._states)
        self.decode_runs = DecodeRuns(pages, self._prefixes, self._queues, self._admission, config.draws)
        self._next_id = config.rank
        self._preempted: list[int] = []
        self._holdup: Holdup | None = None
        self._rests = False  # the plan is outstanding that waits for transfers alone

    @property
    def max_sequences(self) -> int:
        """How many can run at once."""
        return self.config.max_sequences

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._requests)

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._queues.running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue; samples that will fork from a running one are not in it."""
        return len(self._queues.waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to be computed before sequences draw again: of those that wait, cached ones included, and of
        those that run in chunks. It looks at all of them."""
        return self._queues.waiting_tokens

    @property
    def needs_known_ids(self) -> bool:
        """Whether a running sequence must have all its ids on the host before its next step is planned."""
        return any(sequence.long_bad_words for sequence in self._queues.running)

    @property
    def has_space(self) -> bool:
        """Whether a request that came now could have tokens in the next step, behind those that are in line."""
        return self._queues.has_space(self.config.max_tokens)

    def take_waiting(self) -> tuple[Waiting, ...]:
        """Why those wait that the last plan left out, and who was preempted since this was asked before: also while
        nothing could run. Of each rank that has sequences of its own: here of one."""
        if self._holdup is None and not self._preempted:
            return (NOBODY,)
        preempted, self._preempted = tuple(self._preempted), []
        return (Waiting(self._holdup, preempted),)

    def sequence(self, id: int) -> Sequence | None:
        """An unfinished sequence; None once it has ended."""
        return self._sequences.get(id)

    def has(self, request_id: str) -> bool:
        """Whether a request is unfinished."""
        return request_id in self._requests

    def add(self, request: Request, matcher: LLMatcher | None = None) -> list[Sequence]:
        """Queue a request and return its samples. Raises ValueError if it can never run or its id is in use. Whatever
        it raises, the other requests stay as they are.

        matcher: of the request's grammar, at its beginning.
        """
        if request.id in self._requests:
            raise ValueError(f"request id {request.id!r} is in use by an unfinished request: choose another")
        max_length = request.max_length(self.config.max_length, self._pages, self._prefixes.windows)
        sequences = []
        for index in range(request.params.n):
            prompt = list(request.prompt)
            sequence = Sequence(self._next_id, request, index, max_length, prompt, len(prompt))
            sequence.matcher = matcher.deep_copy() if matcher is not None else None
            sequences.append(sequence)
            self._next_id += self.config.ranks
        self._requests[request.id] = list(sequences)
        self._sequences.update((sequence.id, sequence) for sequence in sequences)
        sequences[0].unforked = sequences[1:]
        self._queues.enqueue(sequences[0])
        return sequences

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """The next step; None if nothing can run before an outstanding plan is completed. now: seconds on any clock, by
        which those in line have waited."""
        self._prefixes.publish()
        builder = PlanBuilder(self.config.max_tokens, self._pages.page_size)
        prefilling = self._decodes.plan(builder, self.config)
        may_admit = bool(self._queues.waiting) and self._queues.free_slots > 0
        if self.config.target is not None and (prefilling or may_admit):
            builder.limit_prompts(self.config.target, self._admission.in_line(prefilling, now))
        for sequence in prefilling:
            self._admit_waiting(builder, before=sequence)
            if builder.budget:
                count = self._states.chunk(sequence, sequence.computed, builder)
                if self._windows is not None:
                    count = self._growth.fitting(sequence, count, builder, prefilling)
                self._prefill(sequence, count, builder)
        self._admit_waiting(builder)
        # A step of several stages has a part of the sequences, and what those share is not known.
        shared = self._pages.shared if self.config.stages == 1 else NONE_SHARED
        transfers = self._prefixes.transfers
        if builder.runs_none:
            # If nothing runs and nothing is under way but transfers, a plan waits for one of them.
            if not transfers.under_way or self._queues.running or self._rests:
                return None
            self._rests = True
        if transfers.under_way:
            builder.copies += transfers.take_unsent()
        plan = builder.plan(self._queues.ended, shared)
        self._queues.ended = []
        return plan

    def complete(self, plan: StepPlan, ids: Iterable[int], arrived: Iterable[TransferEnd] = ()) -> list[Update]:
        """Take the sampled ids, in the order of the plan's draws, and end the sequences that they end. arrived: pages
        from elsewhere, since the plan before.

        Ids for sequences that have ended in the meantime are dropped, and so is what is `REJECTED`. Another negative id
        says that none could be drawn: the whole request ends then with the reason "error", the sample that failed first
        of its updates.
        """
        self._prefixes.transfers.arrive(arrived)
        self._rests = self._rests and bool(plan.chunks)
        updates: list[Update] = []
        failed: list[Sequence] = []
        unfinished = self._sequences
        newest: Sequence | None = None
        for (id, _), token in zip(plan.draws, ids, strict=True):
            sequence = unfinished.get(id)
            if sequence is None:
                continue
            sequence.pending -= 1
            if token < 0:
                if token == REJECTED:
                    self._reject(sequence)
                else:
                    failed.append(sequence)
                continue
            if not sequence.verified:
                self._verify(sequence)
            tokens = sequence.tokens
            tokens.append(token)
            reason = None
            if token in sequence.end_ids and len(tokens) >= sequence.min_length:
                reason = "stop"
                self._end(sequence, reason, token if token in sequence.request.params.stop_ids else None)
            elif len(tokens) >= sequence.max_length:
                reason = "length"
                self._end(sequence, reason, None)
            if sequence is newest:  # a draft was right
                sequence.drafted -= 1
                updates[-1] = Update(sequence, [*updates[-1].tokens, token], reason)
                continue
            updates.append(Update(sequence, [token], reason))
            newest = sequence
        for sequence in failed:  # last, because what another draw of this step could read is valid
            self._invalidate(sequence)
            updates += self.fail(sequence)
        return updates

    def fail(self, sequence: Sequence, error: str | None = None) -> list[Update]:
        """End the request of a sequence that can get no further id. error: why, if not for its logits."""
        if sequence.finished:  # with another sample of the request
            return []
        samples = self._requests[sequence.request.id]
        ended = [sequence, *(sample for sample in samples if sample is not sequence)]
        for sample in ended:
            sample.error = error
            self._end(sample, "error", None)
        return [Update(sample, [], "error") for sample in ended]

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence for a reason that ids do not tell, such as a stop string. It may have ended already."""
        self._end(sequence, reason, stop_reason)

    def abort(self, request_id: str) -> list[Sequence]:
        """End all samples of a request; returns those that were unfinished, none if the request is unknown."""
        sequences = list(self._requests.get(request_id, ()))
        for sequence in sequences:
            self._end(sequence, "abort", None)
        return sequences

    def reset(self) -> None:
        """End all requests and forget all pages, in whatever state a call that was interrupted has left them."""
        unfinished = [sequence for samples in self._requests.values() for sequence in samples]
        for sequence in (*unfinished, *self._queues.running, *self._queues.waiting):
            sequence.status, sequence.finish_reason = Status.FINISHED, "abort"
            sequence.slot, sequence.pages, sequence.windows, sequence.marks = NO_SLOT, [], (), None
            sequence.unforked = []
        self._requests, self._sequences = {}, {}
        self._preempted, self._holdup, self._rests = [], None, False
        self._queues.clear()
        self._admission.clear()
        self._pages.clear()
        self._prefixes.clear()

    def check(self) -> None:
        """Raise AssertionError unless pages, slots, queues and the prefix tree agree. It walks all of them."""
        queues = self._queues
        queues.check()
        for sequence in queues.running:
            assert sequence.computed <= len(sequence.tokens) + sequence.pending, f"{sequence}: computed too much"
            assert 0 <= sequence.drafted <= max(0, sequence.pending - 1), f"{sequence}: {sequence.drafted} drafted"
        unforked = [sample for sequence in (*queues.running, *queues.waiting) for sample in sequence.unforked]
        known = [sequence for sequences in self._requests.values() for sequence in sequences]
        listed = [*queues.running, *queues.waiting, *(sample for sample in unforked if not sample.finished)]
        assert sorted(known, key=order) == sorted(listed, key=order), "a sequence is lost or listed twice"
        assert self._sequences == {sequence.id: sequence for sequence in known}, "a sequence that ended is found by id"
        self._prefixes.check(queues.running)

    def _reject(self, sequence: Sequence) -> None:
        """A row of a sequence was behind a wrong draft: what it computed there is written over."""
        sequence.drafted -= 1
        if sequence.status is Status.RUNNING:
            self._states.reject(sequence)

    def _verify(self, sequence: Sequence) -> None:
        """A sequence has drawn its first id since it started; if it still runs, its pages are those that were read."""
        if sequence.status is Status.RUNNING:
            sequence.verified = True
            self._prefixes.verify(sequence)

    def _invalidate(self, sequence: Sequence) -> None:
        """Nothing stays cached that only the draws of a request have read, of which one could draw no id."""
        self._prefixes.invalidate(sequence)
        for sample in self._requests.get(sequence.request.id, ()):
            sample.verified = False  # its pages must not come back as verified ones

    def _prefill(self, sequence: Sequence, count: int, builder: PlanBuilder) -> None:
        """Plan so many of the tokens that a sequence has not computed."""
        start, total, slot = sequence.computed, len(sequence.tokens), sequence.slot
        builder.take(start, count, self._states.wanted(sequence, start))
        if not count:
            return
        if sequence.marks is not None:
            self._states.after_drafts(sequence, builder)
        sequence.computed = start + count
        self._states.keep(sequence, builder)
        if self._windows is not None:
            builder.windows += self._windows.take(sequence, start)
        draws: tuple[Draw, ...] = ()
        if sequence.computed == total:
            sequence.pending = 1
            draws = sequence.draws + self._fork(sequence, builder)
            banned = sequence.completed_bad_words() if sequence.long_bad_words else ()
            builder.banned += ((draw.slot, token) for draw in draws for token in banned)
        unsent = tuple(sequence.pages[sequence.sent_pages :])
        chunk = Chunk(sequence.id, slot, start, count, draws, sequence.sent_pages, unsent)
        sequence.sent_pages = len(sequence.pages)
        (builder.decodes if count == 1 and len(draws) == 1 else builder.others).append(chunk)
        self._prefixes.fill(sequence, start)

    def _fork(self, sequence: Sequence, builder: PlanBuilder) -> tuple[Draw, ...]:
        """Let the other samples of the request go on from its prompt; those that find no slot queue up instead."""
        draws: tuple[Draw, ...] = ()
        for sample in sequence.unforked:
            if sample.finished:
                continue
            if not self._queues.free_slots:
                self._queues.enqueue(sample)
                continue
            self._start(sample, list(sequence.pages), builder)
            for page in sample.pages:
                self._pages.share(page)
            if self._windows is not None:
                self._windows.fork(sequence, sample)
            self._states.fork(sequence, sample, builder)
            sample.computed, sample.pending, sample.cached_tokens = sequence.computed, 1, sequence.cached_tokens
            draws += sample.draws
        sequence.unforked = []
        return draws

    def _admit_waiting(self, builder: PlanBuilder, before: Sequence | None = None) -> None:
        """Admit in order, until a sequence must wait for pages or an id and all behind it with it. before: only those
        that come before this one, as those of a higher priority do.

        Those that wait for what comes from elsewhere are passed over. Those that wait for what this step fills are
        deferred: slots and pages are reserved for them, and those behind them have to fit into this step whole, so that
        the next step is theirs.
        """
        waiting, size = self._queues.waiting, self._pages.page_size
        passed = deferred = reserved = 0
        self._holdup = None
        while passed < len(waiting) and deferred < self._queues.free_slots and builder.budget:
            sequence = waiting[passed]
            if before is not None and sequence.order > before.order:
                break
            found = self._admission.find(sequence, reserved)
            if found is None:
                self._holdup = "pages"
                break
            if found == "loading":
                passed += 1
                continue
            if self._prefixes.is_filling(sequence, found):
                self._prefixes.release(found)
                passed, deferred = passed + 1, deferred + 1
                reserved += self._admission.wanted(sequence, found)
                continue
            cached = len(found) * size
            self._states.mark(sequence, cached)
            count = self._states.chunk(sequence, cached, builder)
            if self._windows is not None:
                count = self._windows.fitting(sequence, cached, count)
            goes_ahead = (
                count == len(sequence.tokens) - cached and len(sequence.unforked) < self._queues.free_slots - deferred
            )
            if not count or (deferred and not goes_ahead):
                self._prefixes.release(found)
                self._holdup = "step_full"
                break
            del waiting[passed]
            self._admit(sequence, found, builder)
            self._prefill(sequence, count, builder)
        if waiting and self._holdup is None:
            if passed:
                self._holdup = "prefix"
            else:
                self._holdup = "step_full" if self._queues.free_slots else "slot"

    def _admit(self, sequence: Sequence, found: list[int], builder: PlanBuilder) -> None:
        """Give a sequence a slot and all its pages, of which some were found."""
        cached = len(found) * self._pages.page_size
        if self._windows is not None:
            self._windows.begin(sequence, found)
        pages = self._admission.take(sequence, found)
        self._start(sequence, pages, builder)
        self._states.begin(sequence, found, builder)
        sequence.computed = cached
        if self._prefixes.uses_cache(sequence) and not sequence.preemptions:
            sequence.cached_tokens = cached
            self.statistics.prefix_queries += sequence.prompt_length
            self.statistics.prefix_hits += cached

    def _start(self, sequence: Sequence, pages: list[int], builder: PlanBuilder) -> None:
        slot = self._queues.start(sequence)
        sequence.draws = (Draw(sequence.id, slot),)
        builder.new.append(new_sequence(sequence, slot, self.config.seed))
        sequence.pages = pages

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages; it computes them again when it is admitted again."""
        self._stop(sequence)
        self._preempted.append(sequence.id)
        sequence.preemptions += 1
        self.statistics.preemptions += 1
        self._queues.enqueue(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Take slot and pages from a running sequence."""
        self._queues.stop(sequence)
        self._prefixes.free(sequence)
        sequence.pages, sequence.computed, sequence.sent_pages, sequence.in_line = [], 0, 0, None
        sequence.verified = False

    def _end(self, sequence: Sequence, reason: str, stop_reason: int | str | None) -> None:
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        if sequence.finished:
            return
        if sequence.status is Status.RUNNING:
            self._stop(sequence)
        else:
            self._queues.leave(sequence)
        sequence.status = Status.FINISHED
        del self._sequences[sequence.id]
        for sample in sequence.unforked:
            if not sample.finished:
                self._queues.enqueue(sample)
        sequence.unforked = []
        siblings = self._requests[sequence.request.id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request.id]
