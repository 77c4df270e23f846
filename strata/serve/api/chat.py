"""/v1/chat/completions: messages to a prompt, the model's samples to choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from fastapi import Request, Response

from strata.serve.api.answer import AnswerWriter
from strata.serve.api.chat_choice import ChoiceStream, whole_choice
from strata.serve.api.dialogue import Tools, parse_dialogue
from strata.serve.api.prompts import Prompt, chat_prompt
from strata.serve.generation import SampleDelta
from strata.serve.grammar import answer_grammar
from strata.serve.http.limits import AdmittedRequest
from strata.serve.http.routes import api_router
from strata.serve.http.sse import EventStream, run_until_disconnect, streams
from strata.serve.observe.logs import note_prompt
from strata.serve.replies.reply_parser import ReplyParser
from strata.serve.schema.chat import ChatRequest
from strata.serve.schema.chat_reply import ChatChunk, ChatCompletion
from strata.serve.schema.messages import as_sent
from strata.serve.state import received, server_of

router = api_router("chat")


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=streams(ChatChunk))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    received(request, "chat")
    if body.stream:
        return EventStream(_stream(body, request))
    return await run_until_disconnect(request, _answer(body, request))


async def _answer(body: ChatRequest, request: Request) -> Response:
    answer, prompt_ids, parsers = await _parse(body, request)
    deltas: list[list[SampleDelta]] = [[] for _ in parsers]
    async with answer.generations[0] as generation:
        async for batch in generation:
            for delta in batch:
                deltas[delta.index].append(delta)
    tokenizer = server_of(request).tokenizer
    choices = [
        whole_choice(index, own, parser, tokenizer, prompt_ids is not None)
        for index, (own, parser) in enumerate(zip(deltas, parsers, strict=True))
    ]
    return await answer.whole(choices, **({} if prompt_ids is None else {"prompt_token_ids": prompt_ids}))


async def _stream(body: ChatRequest, request: Request) -> AsyncGenerator[bytes, None]:
    answer, prompt_ids, parsers = await _parse(body, request)
    choices = [
        ChoiceStream(answer, index, parser, server_of(request).tokenizer, prompt_ids is not None)
        for index, parser in enumerate(parsers)
    ]
    roles = b"".join([choice.role(None if choice.index else prompt_ids) for choice in choices])
    async with answer.generations[0] as generation:
        async for deltas in generation:
            chunks, roles = roles + b"".join([choices[delta.index].chunks(delta) for delta in deltas]), b""
            if chunks:
                yield chunks
    yield await answer.last()


async def _parse(body: ChatRequest, request: Request) -> tuple[AnswerWriter, list[int] | None, list[ReplyParser]]:
    """The answer, about to be generated, the ids of its prompt if they are to be told, and a parser for each choice.
    Raises ApiError for what cannot be served."""
    object = "chat.completion.chunk" if body.stream else "chat.completion"
    answer = AnswerWriter(request, body, "chatcmpl", object, service_tier="default")
    body.check()

    async def render(admission: AdmittedRequest, tools: Tools) -> Prompt:
        return await chat_prompt(
            server_of(request),
            admission,
            as_sent(body.messages),
            rendered=partial(note_prompt, request.scope),
            **body.rendering(tools),
        )

    asked, parsers = await parse_dialogue(body, request, lambda: answer_grammar(body), render)
    answer.generate("chat", asked)
    return answer, asked.prompt if body.return_token_ids else None, parsers
