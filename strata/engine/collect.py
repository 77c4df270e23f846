"""Gathers what a request's sequences bring into the output that its caller sees."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from strata.engine.detokenize import IncrementalDetokenizer
from strata.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from strata.engine.request import Request, Sequence
from strata.engine.sampler import LogprobTensors
from strata.models.tokenizer import Tokenizer


@dataclass
class _Sample:
    detokenizer: IncrementalDetokenizer | None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Collector:
    """The output of one request, as far as it has come. `tokenizer` None gives ids without text."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self._prompt = prompt
        self._tokenizer = tokenizer if request.params.detokenize else None
        self._samples = [_Sample(self._detokenizer()) for _ in range(request.params.n)]
        reported = request.params.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if reported else None
        self._cached_tokens = 0
        self._error: str | None = None
        self._first_token: float | None = None
        self._finished: float | None = None

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self._samples)

    def append(self, sequence: Sequence, token: int, finish_reason: str | None) -> str | None:
        """Take a sequence's next id; returns the stop string if the text has now reached one."""
        if self._first_token is None:
            self._first_token = time.monotonic()
            self._cached_tokens = sequence.cached_tokens
        sample = self._samples[sequence.index]
        sample.ids.append(token)
        if sample.detokenizer is None:
            self._end(sample, finish_reason, sequence.stop_reason)
            return None
        ended_by_id = finish_reason == "stop"
        if not ended_by_id or self.request.params.include_stop_str_in_output:
            sample.text += sample.detokenizer.append(token)
        if sample.detokenizer.stopped is not None:
            self._end(sample, "stop", sample.detokenizer.stopped)
            return sample.detokenizer.stopped
        if finish_reason is not None:
            sample.text += sample.detokenizer.finish()
        self._end(sample, finish_reason, sequence.stop_reason)
        return None

    def append_logprobs(self, sequence: Sequence, tensors: LogprobTensors, row: int) -> None:
        """Log-probabilities of the id that `append` took last, from row `row` of a step's."""
        most, sample = self.request.params.logprobs, self._samples[sequence.index]
        if most is None:
            return
        entry = self._entry(sample.ids[-1], tensors, row, most)
        sample.logprobs.append(entry)
        sample.cumulative += entry[sample.ids[-1]].logprob

    def append_prompt_logprobs(self, first: int, tensors: LogprobTensors) -> None:
        """Log-probabilities of the prompt's tokens from `first` on; a part computed before (preemption) is left out."""
        most, seen = self.request.params.prompt_logprobs, self._prompt_logprobs
        assert most is not None
        assert seen is not None
        for row in range(len(seen) - first, len(tensors.chosen)):
            seen.append(self._entry(self.request.prompt[first + row], tensors, row, most))

    def fail(self, sequence: Sequence) -> None:
        """A sequence has ended because it, or another sample of the request told before, could draw no id."""
        sample = self._samples[sequence.index]
        if self._first_token is None:
            self._cached_tokens = sequence.cached_tokens
        if self._error is None:
            self._error = (
                f"sample {sequence.index} ended before its output token {len(sample.ids) + 1}: the logits hold NaN or "
                "infinity, or no token is allowed; look for NaN in the weights, for overflow (dtype float16: try "
                "bfloat16), and at logit_bias, bad_words and min_tokens"
            )
        if sample.detokenizer is not None:
            sample.text += sample.detokenizer.finish()
        self._end(sample, "error", None)

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
                    text=sample.text,
                    token_ids=list(sample.ids),
                    cumulative_logprob=sample.cumulative if reported else None,
                    logprobs=list(sample.logprobs) if reported else None,
                    finish_reason=sample.finish_reason,
                    stop_reason=sample.stop_reason,
                )
                for index, sample in enumerate(self._samples)
            ],
            finished=self.finished,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._cached_tokens,
            metrics=RequestMetrics(self.request.arrival, self._first_token, self._finished),
            error=self._error,
        )

    def _end(self, sample: _Sample, reason: str | None, stop_reason: int | str | None) -> None:
        sample.finish_reason, sample.stop_reason = reason, stop_reason
        if self.finished:
            self._finished = time.monotonic()

    def _entry(self, token: int, tensors: LogprobTensors, row: int, most: int) -> dict[int, Logprob]:
        """The likeliest `most` ids and the id itself, likeliest first."""
        ids = tensors.top_ids[row, :most].tolist()
        values = tensors.top[row, :most].tolist()
        entry = {
            id: Logprob(value, rank, self._text(id))
            for rank, (id, value) in enumerate(zip(ids, values, strict=True), 1)
        }
        if token not in entry:
            entry[token] = Logprob(float(tensors.chosen[row]), int(tensors.ranks[row]), self._text(token))
        return entry

    def _text(self, token: int) -> str | None:
        return self._tokenizer.decode([token], skip_special_tokens=False) if self._tokenizer is not None else None

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        params = self.request.params
        return IncrementalDetokenizer(
            self._tokenizer,
            self.request.prompt,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
