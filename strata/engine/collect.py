"""Gathers what a request's sequences bring into the output that its caller sees, whoever steps the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Listed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

from strata.engine.faults import why_no_id
from strata.engine.loop import EngineLoop, StepOutput
from strata.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from strata.engine.process.messages import TokenLogprobs
from strata.engine.request import Request, Sequence
from strata.engine.samples import Sample
from strata.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from strata.engine.sampler import LogprobTensors


class LogprobRows:
    """The rows of tensors that are on the host. They become Python values at once, when the first of them is read."""

    def __init__(self, tensors: LogprobTensors) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors.chosen)

    def entry(self, row: int, token: int, most: int) -> TokenLogprobs:
        """What `row` tells of `token`, which it was computed for, and of the likeliest `most` ids."""
        chosen, ranks, top_ids, top = self._values
        return TokenLogprobs(token, chosen[row], ranks[row], top_ids[row][:most], top[row][:most])

    @cached_property
    def _values(self) -> tuple[list[float], list[int], list[list[int]], list[list[float]]]:
        tensors = self._tensors
        return (
            tensors.chosen.tolist(),
            tensors.ranks.tolist(),
            tensors.top_ids.tolist(),
            tensors.top.tolist(),
        )


@dataclass
class _Collected:
    sample: Sample
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative: float = 0.0


class Collector:
    """The output of one request, as far as it has come. `tokenizer` None gives ids without text.

    clock: tells seconds, as it did when the request arrived.
    finished: all samples have ended. changes: counts what has been added.
    """

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, clock: Callable[[], float]
    ) -> None:
        self.request = request
        self._clock = clock
        self._prompt = prompt
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._samples = [
            _Collected(Sample.of(request.params, request.prompt, tokenizer)) for _ in range(request.params.n)
        ]
        reported = request.params.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if reported else None
        self._cached_tokens = 0
        self._error: str | None = None
        self._first_token: float | None = None
        self._finished: float | None = None
        self.finished = False
        self.changes = 0

    def append(self, sequence: Sequence, tokens: list[int], finish_reason: str | None) -> str | None:
        """Take a sequence's next ids, up to one with which the text reaches a stop string, which is returned then."""
        if self._first_token is None:
            self._first_token = self._clock()
            self._cached_tokens = sequence.cached_tokens
        collected = self._samples[sequence.index]
        before = collected.sample.count
        collected.text += collected.sample.append(tokens, finish_reason, sequence.stop_reason)
        collected.ids += tokens[: collected.sample.count - before]
        self._note_change(collected)
        stopped = collected.sample.stop_reason
        return stopped if isinstance(stopped, str) else None

    def append_logprobs(self, sequence: Sequence, rows: LogprobRows, row: int) -> None:
        """Log-probabilities of the ids that `append` took last, from row `row` of a step's on."""
        most, collected = self.request.params.logprobs, self._samples[sequence.index]
        if most is None:
            return
        for place, token in enumerate(collected.ids[len(collected.logprobs) :]):
            entry = rows.entry(row + place, token, most)
            collected.logprobs.append(self._by_id(entry))
            collected.cumulative += entry.logprob

    def append_prompt_logprobs(self, first: int, rows: LogprobRows) -> None:
        """Log-probabilities of the prompt's tokens from `first` on; a part computed before (preemption) is left out."""
        most, seen = self.request.params.prompt_logprobs, self._prompt_logprobs
        assert most is not None
        assert seen is not None
        for row in range(len(seen) - first, len(rows)):
            seen.append(self._by_id(rows.entry(row, self.request.prompt[first + row], most)))

    def fail(self, sequence: Sequence) -> None:
        """A sequence has ended because it, or another sample of the request told before, could draw no id."""
        collected = self._samples[sequence.index]
        if self._first_token is None:
            self._cached_tokens = sequence.cached_tokens
        if self._error is None:
            self._error = why_no_id(sequence)
        collected.text += collected.sample.fail()
        self._note_change(collected)

    def output(self) -> RequestOutput:
        """What there is so far, as a value of its own."""
        reported = self.request.params.logprobs is not None
        return RequestOutput(
            request_id=self.request.id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt),
            outputs=[
                CompletionOutput(
                    index=index,
                    text=collected.text,
                    token_ids=list(collected.ids),
                    cumulative_logprob=collected.cumulative if reported else None,
                    logprobs=list(collected.logprobs) if reported else None,
                    finish_reason=collected.sample.finish_reason,
                    stop_reason=collected.sample.stop_reason,
                )
                for index, collected in enumerate(self._samples)
            ],
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._cached_tokens,
            metrics=RequestMetrics(self.request.arrival, self._first_token, self._finished),
            error=self._error,
        )

    def _note_change(self, collected: _Collected) -> None:
        self.changes += 1
        if collected.sample.finish_reason is not None:
            self.finished = all(one.sample.finish_reason is not None for one in self._samples)
            if self.finished:
                self._finished = self._clock()

    def _by_id(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The likeliest ids and the id itself, likeliest first."""
        likeliest = zip(entry.top_ids, entry.top_logprobs, strict=True)
        by_id = {id: Logprob(value, rank, self._text(id)) for rank, (id, value) in enumerate(likeliest, 1)}
        if entry.token not in by_id:
            by_id[entry.token] = Logprob(entry.logprob, entry.rank, self._text(entry.token))
        return by_id

    def _text(self, token: int) -> str | None:
        return self._tokenizer.decode([token], skip_special_tokens=False) if self._tokenizer is not None else None


class Delivery:
    """The one owner of a loop and of the collectors of all its requests.

    Calls may be nested, as in a stream whose reader generates, but not simultaneous: one that comes while another is
    under way, from a second thread or a signal handler, raises RuntimeError. If a step fails, all requests end with it:
    the error goes to whoever stepped, the others get a RuntimeError when they step.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._collectors: dict[str, Collector] = {}
        self._abandoned: deque[str] = deque()
        self._lock = Lock()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Use the engine while nobody else does. Raises RuntimeError if somebody does."""
        if self._lock.locked():
            raise RuntimeError(
                "this LLM is in use: it takes one call at a time, from one thread; give each thread an LLM, or let "
                "`strata serve` answer callers side by side"
            )
        with self._lock:
            yield

    def add(self, collectors: Listed[Collector], matchers: Iterable[LLMatcher | None]) -> None:
        """Queue all requests or none. Raises ValueError for one that can never run."""
        with self.exclusive():
            self._end_abandoned()
            try:
                for collector, matcher in zip(collectors, matchers, strict=True):
                    self._loop.add(collector.request, matcher)
                    self._collectors[collector.request.id] = collector
            except BaseException:
                self._abandoned += [collector.request.id for collector in collectors]
                self._end_abandoned()
                raise

    def step(self, wanted: Collector) -> None:
        """Run a step. Raises RuntimeError if `wanted`, which is unfinished, has ended with a step that failed."""
        with self.exclusive():
            self._end_abandoned()
            if self._loop.idle:
                self._collectors.clear()
            if wanted.request.id not in self._collectors:
                raise RuntimeError(
                    "this request ended unfinished, with a step that failed or was interrupted: repeat it"
                )
            try:
                output = self._loop.step()
                if output is not None:
                    self._deliver(output)
            except BaseException:
                self._abandoned += self._collectors
                self._end_abandoned()
                raise

    def leave(self, collectors: Listed[Collector]) -> None:
        """End what is unfinished of these requests: now, or before the next step if one is under way (this may be the
        end of a stream that the garbage collector found)."""
        self._abandoned += [collector.request.id for collector in collectors if not collector.finished]
        if not self._lock.locked():
            with self._lock:
                self._end_abandoned()

    def _end_abandoned(self) -> None:
        while self._abandoned:
            id = self._abandoned[0]
            self._collectors.pop(id, None)
            self._loop.abort(id)
            self._abandoned.popleft()  # only now: an interrupt must not leave it to run on
        if not self._collectors:  # what is still under way belongs to nobody
            for _ in self._loop.outputs():
                pass

    def _deliver(self, output: StepOutput) -> None:
        collectors = self._collectors
        for sequence, part in output.prompt_logprobs:
            collector = collectors.get(sequence.request.id)
            if collector is not None:
                collector.append_prompt_logprobs(part.first, LogprobRows(part.tensors))
        rows = LogprobRows(output.logprobs) if output.logprobs is not None else None
        for update in output.updates:
            sequence = update.sequence
            collector = collectors.get(sequence.request.id)
            if collector is None:
                continue
            if not update.tokens:
                collector.fail(sequence)
            else:
                stopped = collector.append(sequence, update.tokens, update.finish_reason)
                if rows is not None:
                    collector.append_logprobs(sequence, rows, output.rows[sequence.id])
                if stopped is not None:
                    self._loop.finish(sequence, "stop", stopped)
            if collector.finished:
                del collectors[sequence.request.id]
