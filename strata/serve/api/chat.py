"""/v1/chat/completions: messages to a prompt, the model's samples to choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import Request, Response

from strata.serve.api.answer import AnswerWriter
from strata.serve.api.chat_choice import ChoiceStream, whole_choice
from strata.serve.api.dialogue import Dialogue, Tools, parse_dialogue
from strata.serve.api.prompts import Prompt, chat_prompt
from strata.serve.generation import Generation, SampleDelta
from strata.serve.grammar import answer_grammar
from strata.serve.http.limits import AdmittedRequest
from strata.serve.http.routes import api_router
from strata.serve.http.sse import EventStream, run_until_disconnect, streams
from strata.serve.schema.chat import ChatRequest
from strata.serve.schema.chat_reply import ChatChunk, ChatCompletion
from strata.serve.schema.messages import as_sent
from strata.serve.state import received, server_of

router = api_router("chat")


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=streams(ChatChunk))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """AnswerWriter a conversation."""
    received(request, "chat")
    if body.stream:
        return EventStream(_stream(body, request))
    return await run_until_disconnect(request, _answer(body, request))


async def _answer(body: ChatRequest, request: Request) -> Response:
    answer, dialogue, generation = await _parse(body, request)
    deltas: list[list[SampleDelta]] = [[] for _ in dialogue.parsers]
    async with generation:
        async for batch in generation:
            for delta in batch:
                deltas[delta.index].append(delta)
    tokenizer, with_ids = server_of(request).tokenizer, bool(body.return_token_ids)
    choices = [
        whole_choice(index, own, parser, tokenizer, with_ids)
        for index, (own, parser) in enumerate(zip(deltas, dialogue.parsers, strict=True))
    ]
    return await answer.whole(choices, **({"prompt_token_ids": dialogue.prompt} if with_ids else {}))


async def _stream(body: ChatRequest, request: Request) -> AsyncGenerator[bytes, None]:
    answer, dialogue, generation = await _parse(body, request)
    prompt_ids = dialogue.prompt if body.return_token_ids else None
    choices = [
        ChoiceStream(answer, index, parser, server_of(request).tokenizer, prompt_ids is not None)
        for index, parser in enumerate(dialogue.parsers)
    ]
    roles = b"".join([choice.role(None if choice.index else prompt_ids) for choice in choices])
    async with generation:
        async for deltas in generation:
            chunks, roles = roles + b"".join([choices[delta.index].chunks(delta) for delta in deltas]), b""
            if chunks:
                yield chunks
    yield await answer.last()


async def _parse(body: ChatRequest, request: Request) -> tuple[AnswerWriter, Dialogue, Generation]:
    """The request as the engine takes it. Raises ApiError for what cannot be served."""
    state = server_of(request)
    object = "chat.completion.chunk" if body.stream else "chat.completion"
    answer = AnswerWriter(request, body, "chatcmpl", object, service_tier="default")
    body.check()

    async def render(admission: AdmittedRequest, tools: Tools) -> Prompt:
        return await chat_prompt(
            state,
            admission,
            as_sent(body.messages),
            tools=tools,
            add_generation_prompt=body.opens_answer,
            continue_final_message=bool(body.continue_final_message),
            variables=body.template_variables,
            parse_special_tokens=bool(body.parse_special_tokens),
        )

    dialogue = await parse_dialogue(body, request, lambda: answer_grammar(body), render)
    return answer, dialogue, answer.generate("chat", *dialogue[:4])
