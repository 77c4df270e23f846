"""Gathers what a request's sequences bring into the output that its caller sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from strata.engine.faults import why_no_id
from strata.engine.logprob_rows import LogprobRows
from strata.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from strata.engine.process.messages import TokenLogprobs
from strata.engine.request import Request, Sequence
from strata.engine.samples import Sample
from strata.text.tokenizer import Tokenizer


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
