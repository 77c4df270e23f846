"""An answer of chat completions or completions, whole or as chunks: who answers, and what it took.

Chunks are written as bytes, since there is one for every token of every client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import Request, Response

import strata
from strata.engine.watch.request_ledger import PARTS, Part, RequestLedger
from strata.serve.generation import EngineRequest, Generation
from strata.serve.http.routes import json_response
from strata.serve.http.sse import DONE
from strata.serve.observe.metrics import Endpoint
from strata.serve.schema.sampling import SamplingFields
from strata.serve.state import ServerState, request_id_of, server_of

# The same request with the same seed gives the same answer as long as this stays the same.
FINGERPRINT = f"strata-{strata.__version__}"

_encode = msgspec.json.encode


class AnswerWriter:
    """generations: what it is made of. output: False where what they generate is no part of it.

    prefix: of its id. object: its kind, as OpenAI's API names it. fields: what it and every chunk of it has besides.
    """

    def __init__(
        self, request: Request, body: SamplingFields, prefix: str, object: str, output: bool = True, **fields: Any
    ) -> None:
        self.id = f"{prefix}-{uuid4().hex}"
        self.generations: list[Generation] = []
        self._request, self._body, self._output = request, body, output
        self._head = {
            "id": self.id,
            "object": object,
            "created": int(time.time()),
            "model": server_of(request).model_name(body.model),
            "system_fingerprint": FINGERPRINT,
            **fields,
        }
        self._start = b"data: " + _encode(self._head)[:-1]
        self._end = b',"usage":null}\n\n' if body.includes_usage else b"}\n\n"
        self._continuous_usage = body.continuous_usage

    def generate(self, endpoint: Endpoint, asked: EngineRequest) -> Generation:
        """One more generation."""
        made = Generation(self._request, endpoint, asked, priority=self._body.priority, reply_id=self.id)
        self.generations.append(made)
        return made

    def usage(self) -> dict[str, Any]:
        """What has been used so far, see `schema.reply.Usage`."""
        prompt = sum(one.prompt_tokens for one in self.generations)
        completion = sum(one.completion_tokens for one in self.generations) if self._output else 0
        cached = sum(one.cached_tokens for one in self.generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def whole(self, choices: list[Any], **fields: Any) -> Response:
        """The answer, after its generations have ended. choices: as JSON can be made of them."""
        ledger = {"ledger": await self._ledger()} if self._body.ledger else {}
        return json_response({**self._head, "choices": choices, "usage": self.usage(), **fields, **ledger})

    def chunk(self, choice: bytes, fields: bytes = b"") -> bytes:
        """A chunk of one choice, which is JSON. fields: what this chunk has besides, from its comma on."""
        end = self._end
        if self._continuous_usage:
            end = b',"usage":' + _encode(self.usage()) + b"}\n\n"
        return b"".join((self._start, fields, b',"choices":[', choice, b"]", end))

    async def last(self) -> bytes:
        """The end of a stream: before it a chunk without choices, with the usage, the ledger or both, if asked for."""
        told = b""
        if self._body.includes_usage:
            told += b',"usage":' + _encode(self.usage())
        if self._body.ledger:
            told += b',"ledger":' + _encode(await self._ledger())
        return self._start + b',"choices":[]' + told + b"}\n\n" + DONE if told else DONE

    async def _ledger(self) -> dict[str, Any]:
        """Of generations that have ended; those whose engine has ended too are left out."""
        found = await asyncio.gather(*(generation.ledger() for generation in self.generations))
        known = [ledger for ledger in found if ledger is not None]
        return ledger_reply(server_of(self._request), request_id_of(self._request), known)


def ledger_reply(state: ServerState, id: str, ledgers: Sequence[RequestLedger]) -> dict[str, Any]:
    """A `RequestLedgerReply`."""
    head = {"object": "request.ledger", "id": id, "model": state.model_name(None), "device": state.client.ready.device}
    return {**head, "generations": [_told(one) for one in ledgers]}


# Names of the engine's that clients know by others.
_NAMES = {"first_token": "time_to_first_token", "first_parts": "first_token_parts", "beside": "sequences_beside"}


def _told(ledger: RequestLedger) -> dict[str, Any]:
    """A `GenerationLedger`."""
    fields = {_NAMES.get(name, name): value for name, value in msgspec.structs.asdict(ledger).items()}
    return {**fields, "parts": _in_order(ledger.parts), "first_token_parts": _in_order(ledger.first_parts)}


def _in_order(parts: dict[Part, float]) -> dict[Part, float]:
    return {part: parts[part] for part in PARTS if parts.get(part, 0.0) > 0.0}
