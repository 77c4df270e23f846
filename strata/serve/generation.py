"""One prompt on its way to the engine, and its samples on their way back: limits, deadline, text, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Self
from uuid import uuid4

import msgspec
from fastapi import Request

from strata.engine.process.messages import Add, Delta, TokenLogprobs
from strata.engine.samples import Sample
from strata.engine.sampling_params import SamplingParams
from strata.engine.watch.request_ledger import RequestLedger
from strata.serve.client import EngineGone, EngineRefused, Stream
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest
from strata.serve.observe.logs import note_generation
from strata.serve.observe.metrics import Endpoint, RequestRecord
from strata.serve.routing.replicas import ReplicaStream
from strata.serve.state import ledger_name, request_id_of, server_of


class SampleDelta(msgspec.Struct, frozen=True):
    """What one sample got since its last delta.

    text: may be empty, while a character or a possible stop string is incomplete.
    logprobs: one for each of `token_ids`, None unless asked for.
    finish_reason: "stop" or "length" with the last delta of a sample; stop_reason: the stop string or id that ended it.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


class EngineRequest(NamedTuple):
    """What the engine is asked to go on from. prompt: token ids, at least one. bad_words: those of `params` as ids.
    grammar: one that was found to compile."""

    prompt: list[int]
    params: SamplingParams
    bad_words: list[tuple[int, ...]]
    grammar: str | None


class Generation:
    """The samples of one prompt, as an asynchronous iterator over lists of deltas: all that came since the last list.

        async with Generation(...) as generation:
            async for sample_deltas in generation:

    The engine is asked at the first step of the iteration. Leaving the `async with` block before the end aborts the
    request there; that is how a client that has left frees its memory.

    request: admitted, with places for these samples; its log line will tell of them. endpoint: for the metrics.
    priority: lower runs first. reply_id: of what it is answered with, by which its ledger can be asked for.
    cached_tokens: how much of the prompt was in the prefix cache. completion_tokens: of all samples so far.
    record: what the metrics have of it, None until it has ended.

    The iteration raises ApiError: 400 for a prompt that does not fit the model, 408 at the deadline, 503 when the
    engine is gone, 500 when it failed on the request.
    """

    def __init__(
        self,
        request: Request,
        endpoint: Endpoint,
        asked: EngineRequest,
        *,
        priority: int | None = None,
        reply_id: str = "",
    ) -> None:
        prompt, params, bad_words, grammar = asked
        self._state = server_of(request)
        self._admission: AdmittedRequest = request.scope["state"]["admission"]
        self._endpoint = endpoint
        self._admission.add_prompt(len(prompt))
        self._add = Add(
            id=uuid4().hex,
            prompt=prompt,
            params=params,
            priority=priority or 0,
            # Not of the request's arrival: whoever sends a body slowly would pass those who came meanwhile.
            arrival=time.monotonic(),
            salt=self._admission.caller.salt,
            bad_words=bad_words,
            grammar=grammar,
            began=self._admission.arrival,
            names=[ledger_name(request, id) for id in (request_id_of(request), reply_id) if id],
        )
        self._samples = [Sample.of(params, prompt, self._state.tokenizer) for _ in range(params.n)]
        self._last_times = [0.0] * params.n
        self._running = params.n
        self._stream: Stream | ReplicaStream | None = None
        self._ended = False
        self._scheduled: float | None = None
        self._first_token: float | None = None
        self._reason = "abort"
        self.cached_tokens = 0
        self.record: RequestRecord | None = None
        note_generation(request.scope, self)

    @property
    def prompt_tokens(self) -> int:
        return len(self._add.prompt)

    @property
    def completion_tokens(self) -> int:
        return sum(sample.count for sample in self._samples)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Of the prompt's tokens from the second on, if asked for; there with the first deltas."""
        return self._stream.prompt_logprobs if self._stream is not None else []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):  # being cancelled is none
            self._reason = "error"
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[SampleDelta]:
        if self._running == 0:
            raise StopAsyncIteration
        if self._stream is None:
            self._stream = self._start()
        deltas = await self._next_deltas(self._stream)
        now = time.monotonic()
        if self._first_token is None:
            self._note_first(deltas[0], now)
        sample_deltas = [self._sample_delta(delta, now) for delta in deltas]
        output = sum(len(sample_delta.token_ids) for sample_delta in sample_deltas)
        self._state.metrics.tokens(prompt=0, output=output, caller=self._admission.caller.name)
        if self._running == 0:
            await self.aclose()
        return sample_deltas

    async def aclose(self) -> None:
        """Give back what the request holds; if it has not ended, it is aborted. A second call has no effect."""
        self._running = 0
        if self._ended:
            return
        self._ended = True
        self._admission.release(self._add.params.n, self.completion_tokens)
        if self._stream is not None:
            self._record()
            self._timer.cancel()
            await self._stream.aclose()
            if self.record is not None:
                self._stream.client.delivered(self._add.id, self.record.ended)

    async def ledger(self) -> RequestLedger | None:
        """Where its time went, once it has ended; None if the engine has ended too."""
        if self._stream is None:
            return None
        try:
            found = await self._stream.client.ledgers(self._add.id)
        except EngineGone:
            return None
        return found[-1] if found else None

    def _start(self) -> Stream | ReplicaStream:
        params, limit = self._add.params, self._state.client.ready.max_model_len
        self._state.require_serving()
        if not self._add.prompt:
            raise ApiError(400, "the prompt has no tokens; give at least one", param="prompt")
        room = limit - self.prompt_tokens
        if room <= 0 or (params.max_tokens or 0) > room:
            raise _too_long(self.prompt_tokens, params.max_tokens, limit)
        try:
            stream = self._state.client.submit(self._add)
        except EngineGone as error:
            raise self._state.engine_gone(str(error)) from None
        # One timer for all tokens: `asyncio.timeout` around each would take a quarter of what a stream costs.
        self._timer = asyncio.get_running_loop().call_later(self._admission.deadline - time.monotonic(), stream.expire)
        return stream

    async def _next_deltas(self, stream: Stream | ReplicaStream) -> list[Delta]:
        try:
            return await anext(stream)
        except TimeoutError:
            raise self._admission.timed_out() from None
        except EngineRefused as error:
            raise ApiError(400, str(error)) from None
        except EngineGone as error:
            raise self._state.engine_gone(str(error)) from None

    def _sample_delta(self, delta: Delta, now: float) -> SampleDelta:
        if delta.error is not None:
            raise self._failed(delta.error)
        sample = self._samples[delta.index]
        before = sample.count
        text = sample.append(delta.tokens, delta.finish_reason, delta.stop_reason)
        new = sample.count - before
        if new and before:
            self._state.metrics.inter_token(now - self._last_times[delta.index], new)
        self._last_times[delta.index] = now
        if sample.finish_reason is not None:
            self._end(delta, sample)
        # What the engine computed past a stop string is no part of the answer.
        cut = new < len(delta.tokens)
        return SampleDelta(
            delta.index,
            text,
            delta.tokens[:new] if cut else delta.tokens,
            delta.logprobs[:new] if cut and delta.logprobs is not None else delta.logprobs,
            sample.finish_reason,
            sample.stop_reason,
        )

    def _failed(self, reason: str) -> ApiError:
        """What is said of a sample that the engine could not go on with."""
        params = self._add.params
        if self._add.grammar is not None and (params.bad_words or params.logit_bias or params.min_tokens):
            reason = (
                "what the answer has to be may need tokens that bad_words or logit_bias forbid, or be shorter than "
                f"min_tokens: {reason}"
            )
            return ApiError(400, reason, code="generation_failed")
        return ApiError(500, reason, code="generation_failed")

    def _end(self, delta: Delta, sample: Sample) -> None:
        self._running -= 1
        self._reason = sample.finish_reason or self._reason
        if delta.finish_reason is None and isinstance(sample.stop_reason, str):
            self._state.client.finish(self._add.id, delta.index, sample.stop_reason)

    def _note_first(self, delta: Delta, now: float) -> None:
        self._first_token = now
        self._scheduled = delta.scheduled
        self.cached_tokens = delta.cached_tokens or 0
        self._state.metrics.first_token(now - self._admission.arrival)
        self._state.metrics.tokens(prompt=self.prompt_tokens, output=0, caller=self._admission.caller.name)

    def _record(self) -> None:
        if self._reason == "abort":
            self._state.metrics.aborted()
        self.record = RequestRecord(
            endpoint=self._endpoint,
            reason=self._reason,
            arrival=self._admission.arrival,
            scheduled=self._scheduled,
            first_token=self._first_token,
            ended=time.monotonic(),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.completion_tokens,
        )
        self._state.metrics.finished(self.record)


def _too_long(prompt: int, output: int | None, limit: int) -> ApiError:
    asked = f"{prompt} of prompt" if output is None else f"{prompt} of prompt and {output} of output"
    needs = "and at least one is to be generated" if output is None else f"that is {prompt + output}"
    return ApiError(
        400,
        f"this model takes at most {limit} tokens; you asked for {asked} ({needs}): shorten the one or the other",
        param="max_tokens" if output is not None and prompt < limit else None,
        code="context_length_exceeded",
    )


async def merged_streams(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, list[SampleDelta]], None]:
    """(which generation, its deltas) in the order in which they come; what a slow reader leaves there gathers there.

    Raises what any of them raises. Does not close them.
    """
    if len(generations) == 1:
        async for deltas in generations[0]:
            yield 0, deltas
        return
    nexts = {asyncio.ensure_future(anext(one)): number for number, one in enumerate(generations)}
    try:
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = nexts.pop(task)
                try:
                    deltas = task.result()
                except StopAsyncIteration:
                    continue
                nexts[asyncio.ensure_future(anext(generations[number]))] = number
                yield number, deltas
    finally:
        for task in nexts:
            task.cancel()
        if nexts:
            await asyncio.wait(nexts)
