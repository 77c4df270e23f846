"""/v1/completions: prompts as they are, the model's samples to choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from fastapi import Request, Response

from strata.serve.admission import admit_generation
from strata.serve.api.completion_choice import ChoiceDelta, ChoiceText, check_echo, echo_of, merged
from strata.serve.api.completion_stream import CompletionStream, written_choice, written_completion
from strata.serve.api.ledger_reply import ledger_of
from strata.serve.api.prompts import Prompt, bad_words_of, encode_all
from strata.serve.generation import Generation, SampleDelta, merged_streams
from strata.serve.grammar import answer_grammar
from strata.serve.http.json_route import api_router
from strata.serve.http.limits import AdmittedRequest
from strata.serve.http.sse import DONE, EventStream, run_until_disconnect, streams
from strata.serve.observe.logs import note_prompt
from strata.serve.schema.completions import DEFAULT_MAX_TOKENS, Completion, CompletionRequest
from strata.serve.schema.reply import ReplyHead, Usage, usage_of
from strata.serve.schema.sampling import check_ids, sampling_params
from strata.serve.state import ServerState, caller_of, server_of
from strata.text.tokenizer import Tokenizer

router = api_router("completions")


@router.post("/v1/completions", response_model=Completion, responses=streams(Completion))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Write on from a prompt, or from each of several."""
    server_of(request).metrics.received("completions", caller_of(request).name)
    if body.stream:
        return EventStream(_stream(body, request))
    return await run_until_disconnect(request, _answer(body, request))


async def _answer(body: CompletionRequest, request: Request) -> Response:
    parsed = await _parse(body, request)
    deltas: list[list[ChoiceDelta]] = [[] for _ in parsed.choices]
    async for batch in parsed.choice_deltas():
        for index, delta in batch:
            deltas[index].append(delta)
    choices = []
    for index, own in enumerate(deltas):
        prompt_ids = parsed.prompt_of(index).ids if body.return_token_ids else None
        choices.append(written_choice(index, merged(own), with_ids=prompt_ids is not None, prompt_ids=prompt_ids))
        await asyncio.sleep(0)  # they may be long
    ledger = await ledger_of(request, parsed.generations) if body.ledger else None
    return Response(written_completion(parsed.head, choices, parsed.usage(), ledger), media_type="application/json")


async def _stream(body: CompletionRequest, request: Request) -> AsyncGenerator[bytes, None]:
    parsed = await _parse(body, request)
    stream = CompletionStream(
        parsed.head,
        with_usage=body.includes_usage,
        usage=parsed.usage if body.continuous_usage else None,
        with_ids=bool(body.return_token_ids),
    )
    unsent = set(range(len(parsed.choices))) if body.return_token_ids else set()
    async with aclosing(parsed.choice_deltas()) as batches:
        async for batch in batches:
            chunks = []
            for index, delta in batch:
                chunks.append(stream.chunk(index, delta, parsed.prompt_of(index).ids if index in unsent else None))
                unsent.discard(index)
            if any(chunks):
                yield b"".join(chunks)
    usage = parsed.usage() if body.includes_usage else None
    ledger = await ledger_of(request, parsed.generations) if body.ledger else None
    yield stream.last(usage, ledger) + DONE


@dataclass(frozen=True)
class _ParsedCompletion:
    """choices: of the first prompt first; each prompt has `samples`.

    scores: only the prompts are reported. The engine generates a token all the same, which is dropped.
    """

    head: ReplyHead
    prompts: list[Prompt]
    generations: list[Generation]
    choices: list[ChoiceText]
    samples: int
    echo: bool
    logprobs: bool
    scores: bool
    tokenizer: Tokenizer

    def usage(self) -> Usage:
        """What has been used so far."""
        return usage_of(self.generations, output=not self.scores)

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.samples]

    async def choice_deltas(self) -> AsyncGenerator[list[tuple[int, ChoiceDelta]], None]:
        """(choice, delta), as many as have come; closing it aborts what has not ended."""
        unechoed = set(range(len(self.generations))) if self.echo else set()
        async with AsyncExitStack() as stack:
            for generation in self.generations:
                await stack.enter_async_context(generation)
            async for number, deltas in await stack.enter_async_context(aclosing(merged_streams(self.generations))):
                batch = await self._echoes(number) if number in unechoed else []
                unechoed.discard(number)
                yield batch + [self._choice_delta(number, delta) for delta in deltas]

    async def _echoes(self, number: int) -> list[tuple[int, ChoiceDelta]]:
        prompt_logprobs = self.generations[number].prompt_logprobs if self.logprobs else None
        echo = await echo_of(self.prompts[number], prompt_logprobs, self.tokenizer)
        return [(index, echo) for index in range(number * self.samples, (number + 1) * self.samples)]

    def _choice_delta(self, number: int, delta: SampleDelta) -> tuple[int, ChoiceDelta]:
        index = number * self.samples + delta.index
        if self.scores:
            return index, ChoiceDelta("", finish_reason="length")
        return index, self.choices[index].append(delta)


async def _parse(body: CompletionRequest, request: Request) -> _ParsedCompletion:
    """The request as the engine takes it. Raises ApiError for what cannot be served."""
    state = server_of(request)
    model = state.model_name(body.model)
    body.check()
    scores = body.max_tokens == 0
    params = sampling_params(
        body,
        state.client.ready,
        max_tokens=1 if scores else body.max_tokens or DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    given = body.prompts()
    admission = admit_generation(request, params, prompts=len(given), priority=body.priority)
    prompts = await _prompts(state, admission, body, given)
    if body.echo:
        check_echo(prompts, params.n, body.logprobs)
    grammar = answer_grammar(body)
    if grammar is not None:
        await state.grammars.check(grammar, admission)
    note_prompt(request.scope, "\n".join(prompt.text for prompt in prompts))
    bad_words = await bad_words_of(state, admission, params)
    head = ReplyHead.new("cmpl", model)
    return _ParsedCompletion(
        head,
        prompts,
        [
            Generation(
                request,
                prompt.ids,
                params,
                endpoint="completions",
                bad_words=bad_words,
                grammar=None if grammar is None else grammar.text,
                priority=body.priority or 0,
                reply_id=head.id,
            )
            for prompt in prompts
        ],
        [
            ChoiceText(prompt, params, state.tokenizer, start=len(prompt.text) if body.echo else 0)
            for prompt in prompts
            for _ in range(params.n)
        ],
        params.n,
        bool(body.echo),
        body.logprobs is not None,
        scores,
        state.tokenizer,
    )


async def _prompts(
    state: ServerState, admission: AdmittedRequest, body: CompletionRequest, given: Sequence[str | list[int]]
) -> list[Prompt]:
    """The prompts as ids, and as texts where those are given or will be shown."""
    several = len(given) > 1
    texts = {
        f"prompt[{number}]" if several else "prompt": one for number, one in enumerate(given) if isinstance(one, str)
    }
    if texts:  # then all are
        add = body.add_special_tokens is not False
        encoded = await encode_all(state, admission, texts, add_special_tokens=add)
        return [Prompt(text, ids) for text, ids in zip(texts.values(), encoded, strict=True)]
    return [_prompt_of_ids(state, body, one) for one in given if not isinstance(one, str)]


def _prompt_of_ids(state: ServerState, body: CompletionRequest, ids: list[int]) -> Prompt:
    check_ids(ids, state.client.ready.vocab_size, "prompt")
    shown = (body.echo or state.settings.log_prompts) and len(ids) <= state.client.ready.max_model_len
    return Prompt(state.tokenizer.decode(ids) if shown else "", ids)
