"""/v1/embeddings: one vector of length 1 for each input, pooled from the model's hidden states."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from typing import Literal
from uuid import uuid4

import msgspec
from fastapi import Request, Response

from strata.engine.messages import Embed
from strata.serve.api.prompts import encode
from strata.serve.client import EngineGone, EngineRefused
from strata.serve.http.errors import ApiError
from strata.serve.http.json_route import api_router
from strata.serve.http.sse import run_until_disconnect
from strata.serve.observe.metrics import RequestRecord
from strata.serve.schema.embeddings import EmbeddingList, EmbeddingRequest
from strata.serve.schema.sampling import check_ids
from strata.serve.state import ServerState, caller_of, server_of

# Of one request at the engine at once, so that others are not kept waiting.
_AT_ONCE = 8

router = api_router("embeddings")


@router.post("/v1/embeddings", response_model=EmbeddingList)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """The vectors of texts."""
    server_of(request).metrics.received("embeddings")
    return await run_until_disconnect(request, _answer(body, request))


async def _answer(body: EmbeddingRequest, request: Request) -> Response:
    state = server_of(request)
    model = state.model_name(body.model)
    prompts = await _prompts(body, state)
    state.require_serving()
    vectors = await _embed(state, request, prompts, body.pooling or "last")
    tokens = sum(map(len, prompts))
    written = [_base64(vector) if body.encoding_format == "base64" else vector for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(written)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": model, "usage": usage}
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _prompts(body: EmbeddingRequest, state: ServerState) -> list[list[int]]:
    """The token ids of each input. Raises ApiError (400) for one that the model cannot take."""
    given = body.input
    inputs = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    prompts = []
    for number, one in enumerate(inputs):
        where = "input" if inputs[0] is given else f"input[{number}]"
        if isinstance(one, str):
            prompt = await encode(state, one, param=where)
        else:
            check_ids(one, state.client.ready.vocab_size, where)
            prompt = list(one)
        _check_length(len(prompt), state.client.ready.max_model_len, where)
        prompts.append(prompt)
    return prompts


def _check_length(tokens: int, most: int, where: str) -> None:
    if tokens == 0:
        raise ApiError(400, f"{where} has no tokens; there is nothing to make a vector of", param=where)
    if tokens > most:
        raise ApiError(
            400,
            f"{where} has {tokens} tokens; this model takes at most {most}: send it in parts",
            param=where,
            code="context_length_exceeded",
        )


async def _embed(
    state: ServerState, request: Request, prompts: list[list[int]], pooling: Literal["last", "mean"]
) -> list[list[float]]:
    """The vectors in the order of the prompts. Limits and metrics count the request as one."""
    arrival = time.monotonic()
    tokens = sum(map(len, prompts))
    admission = state.limits.admit(caller_of(request), tokens, 0)
    reason = "abort"
    try:
        async with asyncio.timeout(state.settings.request_timeout):
            vectors = await _all_vectors(state, prompts, pooling, arrival)
        reason = "stop"
        return vectors
    except TimeoutError:
        reason = "error"
        raise _timed_out(state.settings.request_timeout) from None
    except ApiError:
        reason = "error"
        raise
    finally:
        admission.release(0)
        if reason == "abort":
            state.metrics.aborted()
        state.metrics.finished(
            RequestRecord(
                endpoint="embeddings",
                reason=reason,
                arrival=arrival,
                scheduled=None,
                first_token=None,
                ended=time.monotonic(),
                prompt_tokens=tokens,
                cached_tokens=0,
                output_tokens=0,
            )
        )


async def _all_vectors(
    state: ServerState, prompts: list[list[int]], pooling: Literal["last", "mean"], arrival: float
) -> list[list[float]]:
    """Asks the engine for a few at a time; when this is cancelled or one fails, the others are aborted."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def embed(number: int, prompt: list[int]) -> list[float]:
        async with places:
            try:
                return await state.client.embed(Embed(uuid4().hex, prompt, pooling, arrival))
            except EngineRefused as error:
                raise ApiError(400, f"input {number}: {error}", param="input") from None
            except EngineGone as error:
                raise state.engine_gone(str(error)) from None

    tasks = [asyncio.create_task(embed(number, prompt)) for number, prompt in enumerate(prompts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _timed_out(seconds: float) -> ApiError:
    return ApiError(
        408,
        f"the vectors were not there after {seconds:g} s, the most that one request may take here: send fewer inputs",
        code="timeout",
        headers={"x-should-retry": "false"},
    )


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
