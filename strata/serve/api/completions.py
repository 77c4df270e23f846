"""/v1/completions: prompts as they are, the model's samples to choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

import msgspec
from fastapi import Request, Response

from strata.serve.admission import admit_generation
from strata.serve.api.answer import AnswerWriter
from strata.serve.api.completion_choice import ChoiceDelta, ChoiceText, check_echo, echo_of, written_choice
from strata.serve.api.prompts import Prompt, bad_words_of, encode_all
from strata.serve.generation import EngineRequest, SampleDelta, merged_streams
from strata.serve.grammar import answer_grammar
from strata.serve.http.limits import AdmittedRequest
from strata.serve.http.routes import api_router
from strata.serve.http.sse import EventStream, run_until_disconnect, streams
from strata.serve.observe.logs import note_prompt
from strata.serve.schema.completions import DEFAULT_MAX_TOKENS, Completion, CompletionRequest
from strata.serve.schema.sampling import check_ids, sampling_params
from strata.serve.state import ServerState, received, server_of
from strata.text.tokenizer import Tokenizer

router = api_router("completions")


@router.post("/v1/completions", response_model=Completion, responses=streams(Completion))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Write on from a prompt, or from each of several."""
    received(request, "completions")
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
        choice = written_choice(index, own, with_ids=prompt_ids is not None, prompt_ids=prompt_ids)
        choices.append(msgspec.Raw(choice))
        await asyncio.sleep(0)  # they may be long
    return await parsed.answer.whole(choices)


async def _stream(body: CompletionRequest, request: Request) -> AsyncGenerator[bytes, None]:
    parsed = await _parse(body, request)
    with_ids = bool(body.return_token_ids)
    unsent = set(range(len(parsed.choices))) if with_ids else set()  # choices whose prompt's ids are to be reported
    held: list[list[ChoiceDelta]] = [[] for _ in parsed.choices]
    async with aclosing(parsed.choice_deltas()) as batches:
        async for batch in batches:
            chunks = []
            for index, delta in batch:
                held[index].append(delta)
                if delta.text or delta.finish_reason is not None or index in unsent:
                    prompt_ids = parsed.prompt_of(index).ids if index in unsent else None
                    choice = written_choice(index, held[index], with_ids=with_ids, prompt_ids=prompt_ids)
                    chunks.append(parsed.answer.chunk(choice))
                    held[index] = []
                    unsent.discard(index)
            if chunks:
                yield b"".join(chunks)
    yield await parsed.answer.last()


@dataclass(frozen=True)
class _ParsedCompletion:
    """choices: of the first prompt first; each prompt has `samples`.

    scores: only the prompts are reported. The engine generates a token all the same, which is dropped.
    """

    answer: AnswerWriter
    prompts: list[Prompt]
    choices: list[ChoiceText]
    samples: int
    echo: bool
    logprobs: bool
    scores: bool
    tokenizer: Tokenizer

    def prompt_of(self, choice: int) -> Prompt:
        return self.prompts[choice // self.samples]

    async def choice_deltas(self) -> AsyncGenerator[list[tuple[int, ChoiceDelta]], None]:
        """(choice, delta), as many as have come; closing it aborts what has not ended."""
        generations = self.answer.generations
        unechoed = set(range(len(generations))) if self.echo else set()
        async with AsyncExitStack() as stack:
            for generation in generations:
                await stack.enter_async_context(generation)
            async for number, deltas in await stack.enter_async_context(aclosing(merged_streams(generations))):
                batch = await self._echoes(number) if number in unechoed else []
                unechoed.discard(number)
                yield batch + [self._choice_delta(number, delta) for delta in deltas]

    async def _echoes(self, number: int) -> list[tuple[int, ChoiceDelta]]:
        prompt_logprobs = self.answer.generations[number].prompt_logprobs if self.logprobs else None
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
    scores = body.max_tokens == 0
    answer = AnswerWriter(request, body, "cmpl", "text_completion", output=not scores)
    body.check()
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
    for prompt in prompts:
        asked = EngineRequest(prompt.ids, params, bad_words, None if grammar is None else grammar.text)
        answer.generate("completions", asked)
    choices = [
        ChoiceText(prompt, params, state.tokenizer, start=len(prompt.text) if body.echo else 0)
        for prompt in prompts
        for _ in range(params.n)
    ]
    echo, logprobs = bool(body.echo), body.logprobs is not None
    return _ParsedCompletion(answer, prompts, choices, params.n, echo, logprobs, scores, state.tokenizer)


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
