"""/v1/responses: items to a prompt, what the model writes to items; kept, so that later requests can go on from it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from fastapi import Request, Response

from strata.engine.sampling_params import SamplingParams
from strata.serve.api.dialogue import Tools, parse_dialogue
from strata.serve.api.prompts import Prompt
from strata.serve.api.response_store import StoredResponse
from strata.serve.api.responses_input import assistant_message, input_messages, response_prompt
from strata.serve.api.responses_stream import EventWriter, ResponseInProgress
from strata.serve.generation import Generation
from strata.serve.grammar import Grammar, format_grammar
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest
from strata.serve.http.routes import api_router, json_response
from strata.serve.http.sse import EventStream, run_until_disconnect, streams
from strata.serve.observe.logs import note_prompt
from strata.serve.replies.reply_parser import collect
from strata.serve.schema.responses import ResponsesNamedTool, ResponsesRequest
from strata.serve.schema.responses_reply import DeletedResponse, ResponseObject, ResponseStreamEvent
from strata.serve.schema.structured import TextFormat
from strata.serve.state import ServerState, caller_of, received, server_of

router = api_router("responses")


@router.post("/v1/responses", response_model=ResponseObject, responses=streams(ResponseStreamEvent))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input."""
    received(request, "responses")
    if body.stream:
        return EventStream(_stream(body, request))
    return await run_until_disconnect(request, _answer(body, request))


@router.get("/v1/responses/{id}", response_model=ResponseObject)
async def get_response(request: Request, id: str, stream: Literal["false"] = "false") -> Response:
    """A response that was kept."""
    return json_response(_stored(request, id).body)


@router.delete("/v1/responses/{id}")
async def delete_response(request: Request, id: str) -> DeletedResponse:
    """Forget a response; others that went on from it stay."""
    _stored(request, id)
    server_of(request).responses.delete(caller_of(request).name, id)
    return DeletedResponse(id=id, object="response", deleted=True)


# A response, its generation, and the conversation so far without the instructions; None if it is not to be kept.
_Parsed = tuple[ResponseInProgress, Generation, list[dict[str, Any]] | None]


async def _answer(body: ResponsesRequest, request: Request) -> Response:
    response, generation, messages = await _parse(body, request)
    async with generation:
        async for deltas in generation:
            for delta in deltas:
                response.take(delta)
    _complete(request, response, generation, messages)
    return json_response(response.body)


async def _stream(body: ResponsesRequest, request: Request) -> AsyncGenerator[bytes, None]:
    response, generation, messages = await _parse(body, request)
    writer, begun = EventWriter(), False
    async with generation:
        try:
            async for deltas in generation:
                events = [] if begun else response.begin()
                begun = True
                for delta in deltas:
                    events += response.take(delta)
                if events:
                    yield writer.write(events)
        except ApiError as error:
            if not begun:
                raise
            yield writer.write(response.fail(error))
            return
    _complete(request, response, generation, messages)
    yield writer.write(response.end())


def _complete(
    request: Request, response: ResponseInProgress, generation: Generation, messages: list[dict[str, Any]] | None
) -> None:
    """After the last delta: complete the object, and keep it if that was asked for."""
    response.finish(generation)
    if messages is None:
        return
    kept = StoredResponse(response.body, [*messages, assistant_message(collect(response.reply))])
    response.body["store"] = server_of(request).responses.put(caller_of(request).name, response.body["id"], kept)


async def _parse(body: ResponsesRequest, request: Request) -> _Parsed:
    """The request as the engine takes it. Raises ApiError for what cannot be served."""
    state = server_of(request)
    model = state.model_name(body.model)
    body.check()
    keep = _kept(body, state)
    messages: list[dict[str, Any]] = []

    async def render(admission: AdmittedRequest, tools: Tools) -> Prompt:
        before: list[dict[str, Any]] = []
        if (earlier := body.previous_response_id) is not None:
            before = _stored(request, earlier, "previous_response_id").messages
        messages.extend([*before, *input_messages(body.input, before)])
        return await response_prompt(state, admission, body, messages, tools, partial(note_prompt, request.scope))

    def form() -> Grammar | None:
        return None if body.text is None else format_grammar(body.text.format, "text.format")

    asked, (parser,) = await parse_dialogue(body, request, form, render)
    new = _new_body(body, model, asked.params, keep)
    generation = Generation(request, "responses", asked, priority=body.priority, reply_id=new["id"])
    return ResponseInProgress(new, parser, state.tokenizer), generation, messages if keep else None


def _new_body(body: ResponsesRequest, model: str, params: SamplingParams, store: bool) -> dict[str, Any]:
    """The response object before anything is generated; what the request asked for is repeated in it."""
    tool_choice: Any = body.tool_choice or "auto"
    form = TextFormat(type="text") if body.text is None or body.text.format is None else body.text.format
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "model": model,
        "output": [],
        "usage": None,
        "error": None,
        "incomplete_details": None,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": None if body.reasoning is None else body.reasoning.model_dump(include={"effort", "summary"}),
        "service_tier": "default",
        "store": store,
        "temperature": params.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": tool_choice.model_dump() if isinstance(tool_choice, ResponsesNamedTool) else tool_choice,
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _kept(body: ResponsesRequest, state: ServerState) -> bool:
    """Whether the response is to be kept. Raises ApiError (400) if that is asked for where none can be."""
    if state.settings.api_workers == 1:
        return body.store is not False
    if body.store:
        raise _no_store("store")
    return False


def _stored(request: Request, id: str, param: str | None = None) -> StoredResponse:
    state = server_of(request)
    if state.settings.api_workers > 1:
        raise _no_store(param)
    found = state.responses.get(caller_of(request).name, id)
    if found is None:
        raise ApiError(
            404,
            f"there is no response {id!r:.100} here: it was not stored, was deleted, or has made room for newer ones",
            param=param,
            code="response_not_found",
        )
    return found


def _no_store(param: str | None) -> ApiError:
    return ApiError(
        400,
        "responses are not stored by a server with --api-workers above 1, since each request may reach another worker: "
        "send the whole conversation as input",
        param=param,
        code="responses_not_stored",
    )
