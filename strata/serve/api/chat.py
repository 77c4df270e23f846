"""/v1/chat/completions: messages to a prompt, the model's samples to choices."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import Request, Response

from strata.serve.admission import admit_generation
from strata.serve.api.chat_reply import ChatReply
from strata.serve.api.chat_stream import ChatStream
from strata.serve.api.ledger_reply import ledger_of
from strata.serve.api.prompts import bad_words_of, chat_text, encode
from strata.serve.generation import Generation
from strata.serve.grammar import answer_grammar
from strata.serve.http.json_route import api_router
from strata.serve.http.sse import DONE, EventStream, run_until_disconnect, streams
from strata.serve.observe.logs import note_prompt
from strata.serve.replies.reasoning import opens_reasoning
from strata.serve.replies.reply_parser import ReplyParser, with_visible_tags
from strata.serve.replies.tools import Named, OfferedFunction, ToolUse, use_tools
from strata.serve.schema.base import json_response
from strata.serve.schema.chat import ChatRequest, NamedTool
from strata.serve.schema.chat_reply import ChatChunk, ChatCompletion
from strata.serve.schema.messages import as_sent
from strata.serve.schema.reply import ReplyHead, usage_of
from strata.serve.schema.sampling import sampling_params
from strata.serve.state import caller_of, server_of

router = api_router("chat")


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=streams(ChatChunk))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    server_of(request).metrics.received("chat", caller_of(request).name)
    if body.stream:
        return EventStream(_stream(body, request))
    return await run_until_disconnect(request, _answer(body, request))


@dataclass(frozen=True)
class _ParsedChat:
    """parsers: one for each choice, None where all text is content. prompt_ids: to be reported, None otherwise."""

    head: ReplyHead
    generation: Generation
    parsers: list[ReplyParser | None]
    prompt_ids: list[int] | None


async def _answer(body: ChatRequest, request: Request) -> Response:
    parsed = await _parse(body, request)
    reply = ChatReply(parsed.parsers, server_of(request).tokenizer)
    async with parsed.generation as generation:
        async for deltas in generation:
            reply.take(deltas)
    completion = reply.completion(parsed.head, usage_of([generation]), parsed.prompt_ids)
    if body.ledger:
        completion.ledger = await ledger_of(request, [generation])
    return json_response(completion)


async def _stream(body: ChatRequest, request: Request) -> AsyncGenerator[bytes, None]:
    parsed = await _parse(body, request)
    async with parsed.generation as generation:
        stream = ChatStream(
            parsed.head,
            parsed.parsers,
            server_of(request).tokenizer,
            with_usage=body.includes_usage,
            usage=(lambda: usage_of([generation])) if body.continuous_usage else None,
            prompt_ids=parsed.prompt_ids,
        )
        roles = stream.roles()
        async for deltas in generation:
            chunks, roles = roles + stream.chunks(deltas), b""
            if chunks:
                yield chunks
    usage = usage_of([generation]) if body.includes_usage else None
    ledger = await ledger_of(request, [generation]) if body.ledger else None
    yield stream.last(usage, ledger) + DONE


async def _parse(body: ChatRequest, request: Request) -> _ParsedChat:
    """The request as the engine takes it. Raises ApiError for what cannot be served."""
    state = server_of(request)
    model = state.model_name(body.model)
    body.check()
    params = sampling_params(
        body, state.client.ready, max_tokens=body.requested_max_tokens, logprobs=body.reported_logprobs
    )
    admission = admit_generation(request, params, priority=body.priority)
    tools = _tool_use(body, state.settings.tool_format)
    grammar = tools.grammar
    if grammar is not None:
        await state.grammars.check(grammar, admission)
    text = await chat_text(
        state,
        admission,
        as_sent(body.messages),
        tools=tools.shown,
        add_generation_prompt=body.opens_answer,
        continue_final_message=bool(body.continue_final_message),
        variables=body.template_variables,
        parse_special_tokens=bool(body.parse_special_tokens),
    )
    note_prompt(request.scope, text.text)
    prompt = await encode(state, admission, text, add_special_tokens=False, param="messages")
    reasoning = state.settings.reasoning and grammar is None  # a grammar leaves no room for it
    params = with_visible_tags(params, state.tokenizer, tools.tool_format, reasoning)
    parsed = reasoning or tools.tool_format is not None
    bad_words = await bad_words_of(state, admission, params)
    head = ReplyHead.new("chatcmpl", model)
    return _ParsedChat(
        head,
        Generation(
            request,
            prompt,
            params,
            endpoint="chat",
            bad_words=bad_words,
            grammar=None if grammar is None else grammar.text,
            priority=body.priority or 0,
            reply_id=head.id,
        ),
        [
            ReplyParser(tools.tool_format, reasoning, in_reasoning=opens_reasoning(text.text), parallel=tools.parallel)
            if parsed
            else None
            for _ in range(params.n)
        ],
        prompt if body.return_token_ids else None,
    )


def _tool_use(body: ChatRequest, tool_format: str | None) -> ToolUse:
    functions = [
        OfferedFunction(tool.function.name, tool.function.description, tool.function.parameters)
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    return use_tools(
        functions,
        Named(choice.function.name) if isinstance(choice, NamedTool) else choice,
        parallel=body.parallel_tool_calls is not False,
        tool_format=tool_format,
        answer=answer_grammar(body),
    )
