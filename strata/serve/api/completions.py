"""/v1/completions: prompts as they are, the model's samples to choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from fastapi import Request, Response

from strata.serve.api.completion_choice import ChoiceText, CompletionPrompt, Part, merged
from strata.serve.api.completion_stream import CompletionStream
from strata.serve.api.prompts import encode
from strata.serve.generation import Generation, Piece, generation_for
from strata.serve.generations import as_they_come
from strata.serve.http.json_route import api_router
from strata.serve.http.sse import DONE, EventStream, run_until_disconnect, streams
from strata.serve.observe.logs import note_prompt
from strata.serve.schema.base import json_response
from strata.serve.schema.completions import DEFAULT_MAX_TOKENS, Completion, CompletionChoice, CompletionRequest
from strata.serve.schema.reply import ReplyHead, usage_of
from strata.serve.schema.sampling import check_ids, sampling_params
from strata.serve.state import ServerState, server_of

router = api_router("completions")


@router.post("/v1/completions", response_model=Completion, responses=streams(Completion))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Write on from a prompt, or from each of several."""
    server_of(request).metrics.received("completions")
    if body.stream:
        return EventStream(_stream(body, request))
    return await run_until_disconnect(request, _answer(body, request))


async def _answer(body: CompletionRequest, request: Request) -> Response:
    completing = await _understand(body, request)
    parts: list[list[Part]] = [[] for _ in completing.choices]
    async for batch in completing.parts():
        for index, part in batch:
            parts[index].append(part)
    completion = Completion(
        **completing.head.fields("text_completion"),
        choices=[_choice(index, merged(own)) for index, own in enumerate(parts)],
        usage=usage_of(completing.generations),
    )
    if body.return_token_ids:
        for choice, own in zip(completion.choices, parts, strict=True):
            choice.token_ids = list(merged(own).token_ids)
            choice.prompt_token_ids = completing.prompt_of(choice.index).ids
    return json_response(completion)


async def _stream(body: CompletionRequest, request: Request) -> AsyncGenerator[bytes, None]:
    completing = await _understand(body, request)
    usage = (lambda: usage_of(completing.generations)) if body.continuous_usage else None
    stream = CompletionStream(
        completing.head, with_usage=body.includes_usage, usage=usage, with_ids=bool(body.return_token_ids)
    )
    untold = set(range(len(completing.choices))) if body.return_token_ids else set()
    async with aclosing(completing.parts()) as batches:
        async for batch in batches:
            chunks = []
            for index, part in batch:
                chunks.append(stream.part(index, part, completing.prompt_of(index).ids if index in untold else None))
                untold.discard(index)
            if any(chunks):
                yield b"".join(chunks)
    yield stream.usage(usage_of(completing.generations)) + DONE if body.includes_usage else DONE


@dataclass(frozen=True)
class _Completing:
    """choices: of the first prompt first; each prompt has `samples`."""

    head: ReplyHead
    prompts: list[CompletionPrompt]
    generations: list[Generation]
    choices: list[ChoiceText]
    samples: int
    echo: bool
    logprobs: bool

    def prompt_of(self, choice: int) -> CompletionPrompt:
        return self.prompts[choice // self.samples]

    async def parts(self) -> AsyncGenerator[list[tuple[int, Part]], None]:
        """(choice, part), as many as have come; closing it aborts what has not ended."""
        unechoed = set(range(len(self.generations))) if self.echo else set()
        async with AsyncExitStack() as stack:
            for generation in self.generations:
                await stack.enter_async_context(generation)
            async for number, pieces in await stack.enter_async_context(aclosing(as_they_come(self.generations))):
                batch = list(self._echoes(number)) if number in unechoed else []
                unechoed.discard(number)
                yield batch + [self._part(number, piece) for piece in pieces]

    def _echoes(self, number: int) -> Iterator[tuple[int, Part]]:
        prompt_logprobs = self.generations[number].prompt_logprobs if self.logprobs else None
        for index in range(number * self.samples, (number + 1) * self.samples):
            yield index, self.choices[index].echo(prompt_logprobs)

    def _part(self, number: int, piece: Piece) -> tuple[int, Part]:
        index = number * self.samples + piece.index
        return index, self.choices[index].piece(piece)


async def _understand(body: CompletionRequest, request: Request) -> _Completing:
    """The request as the engine takes it. Raises ApiError for what cannot be served."""
    state = server_of(request)
    model = state.model_name(body.model)
    body.check_stream_options()
    params = sampling_params(
        body,
        state.client.ready,
        max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    prompts = [await _prompt(state, body, given) for given in body.prompts()]
    note_prompt(request.scope, "\n".join(prompt.text for prompt in prompts))
    return _Completing(
        ReplyHead.new("cmpl", model),
        prompts,
        [
            generation_for(request, prompt.ids, params, endpoint="completions", priority=body.priority or 0)
            for prompt in prompts
        ],
        [ChoiceText(prompt, state.tokenizer) for prompt in prompts for _ in range(params.n)],
        params.n,
        bool(body.echo),
        body.logprobs is not None,
    )


async def _prompt(state: ServerState, body: CompletionRequest, given: str | list[int]) -> CompletionPrompt:
    if isinstance(given, str):
        ids = await encode(state, given, add_special_tokens=body.add_special_tokens is not False)
        return CompletionPrompt(given, ids)
    check_ids(given, state.client.ready.vocab_size, "prompt")
    text = state.tokenizer.decode(given) if body.echo or state.settings.log_prompts else ""
    return CompletionPrompt(text, given)


def _choice(index: int, part: Part) -> CompletionChoice:
    return CompletionChoice.model_validate(
        {
            "index": index,
            "text": part.text,
            "logprobs": part.logprobs,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
    )
