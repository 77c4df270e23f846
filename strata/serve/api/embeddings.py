"""/v1/embeddings: one vector of length 1 for each input, pooled from the model's hidden states."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from typing import Literal, cast
from uuid import uuid4

from fastapi import Request, Response

from strata.engine.process.messages import Embed
from strata.serve.admission import admit
from strata.serve.api.prompts import encode_all
from strata.serve.client import EngineGone, EngineRefused
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest
from strata.serve.http.routes import api_router, json_response
from strata.serve.http.sse import run_until_disconnect
from strata.serve.observe.metrics import RequestRecord
from strata.serve.schema.embeddings import EmbeddingList, EmbeddingRequest
from strata.serve.schema.sampling import check_ids
from strata.serve.state import ServerState, received, server_of

# Of one request at the engine at once, so that others are not kept waiting.
_AT_ONCE = 8

router = api_router("embeddings")


@router.post("/v1/embeddings", response_model=EmbeddingList)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """The vectors of texts."""
    received(request, "embeddings")
    return await run_until_disconnect(request, _answer(body, request))


async def _answer(body: EmbeddingRequest, request: Request) -> Response:
    state = server_of(request)
    model = state.model_name(body.model)
    state.require_serving()
    inputs = _inputs(body)
    # Each counts as a request, and as a sequence while the engine has it.
    at_once = min(len(inputs), _AT_ONCE, state.limits.max_concurrent)
    admission = admit(request, sequences=at_once, requests=len(inputs))
    prompts = await _prompts(inputs, state, admission)
    vectors = await _embed(state, admission, prompts, body.pooling or "last", at_once)
    tokens = sum(map(len, prompts))
    written = [_base64(vector) if body.encoding_format == "base64" else vector for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(written)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response({"object": "list", "data": data, "model": model, "usage": usage})


def _inputs(body: EmbeddingRequest) -> dict[str, str | list[int]]:
    """The inputs by the parameter that each is."""
    given = body.input
    if isinstance(given, str):
        return {"input": given}
    if isinstance(given[0], int):
        return {"input": given}
    return {f"input[{number}]": one for number, one in enumerate(cast(list[str | list[int]], given))}


async def _prompts(
    inputs: dict[str, str | list[int]], state: ServerState, admission: AdmittedRequest
) -> list[list[int]]:
    """The token ids of each input. Raises ApiError (400) for one that the model cannot take."""
    texts = {where: one for where, one in inputs.items() if isinstance(one, str)}
    if texts:  # then all are
        prompts = await encode_all(state, admission, texts)
    else:
        prompts = [list(one) for one in inputs.values() if not isinstance(one, str)]
        for where, ids in zip(inputs, prompts, strict=True):
            check_ids(ids, state.client.ready.vocab_size, where)
    for where, ids in zip(inputs, prompts, strict=True):
        _check_length(len(ids), state.client.ready.max_model_len, where)
        admission.add_prompt(len(ids))
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
    state: ServerState,
    admission: AdmittedRequest,
    prompts: list[list[int]],
    pooling: Literal["last", "mean"],
    at_once: int,
) -> list[list[float]]:
    """The vectors in the order of the prompts, of which the engine is asked for a few at a time; when this is cancelled
    or one fails, the others are aborted. Metrics count the request as one."""
    places = asyncio.Semaphore(at_once)

    async def embed(number: int, prompt: list[int]) -> list[float]:
        async with places:
            try:
                vector = await state.client.embed(Embed(uuid4().hex, prompt, pooling, time.monotonic()))
            except EngineRefused as error:
                raise ApiError(400, f"input {number}: {error}", param="input") from None
            except EngineGone as error:
                raise state.engine_gone(str(error)) from None
            state.metrics.tokens(prompt=len(prompt), output=0, caller=admission.caller.name)
            return vector

    tasks = [asyncio.create_task(embed(number, prompt)) for number, prompt in enumerate(prompts)]
    reason = "abort"
    try:
        async with asyncio.timeout(admission.deadline - time.monotonic()):
            vectors = await asyncio.gather(*tasks)
        reason = "stop"
        return vectors
    except (TimeoutError, ApiError) as error:
        reason = "error"
        raise error if isinstance(error, ApiError) else admission.timed_out() from None
    finally:
        for task in tasks:
            task.cancel()
        if reason == "abort":
            state.metrics.aborted()
        ended, tokens = time.monotonic(), sum(map(len, prompts))
        state.metrics.finished(RequestRecord("embeddings", reason, admission.arrival, ended, tokens))


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
