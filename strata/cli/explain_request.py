"""Explains one request of a running server, for `strata explain --request`."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from strata.engine.watch.request_ledger import Part, RequestLedger

if TYPE_CHECKING:
    from strata.plan.explain.explanation import Explanation


class _Ledger(RequestLedger, frozen=True):
    """As a server writes it."""

    first_token: float | None = msgspec.field(name="time_to_first_token")
    first_parts: dict[Part, float] = msgspec.field(name="first_token_parts")
    beside: float = msgspec.field(name="sequences_beside")


class _Told(msgspec.Struct):
    """model, device: None of a server that does not tell them yet."""

    generations: list[_Ledger]
    model: str | None = None
    device: str | None = None


def request_explained(url: str, id: str) -> Explanation:
    """Of several prompts in one request that which ended last. Raises ValueError if the server does not answer, or does
    not know the request."""
    from strata.plan.explain.one_request import explain_request

    if not id.strip():
        raise ValueError(
            f"--request {id!r} names none: give the id of an answer, like chatcmpl-..., or its x-request-id"
        )
    told = asyncio.run(_told(url, id))
    if not told.generations:
        raise ValueError(f"the engine of request {id} has ended, and its ledger with it")
    longest = max(told.generations, key=lambda ledger: ledger.seconds)
    return explain_request(longest, name=id, server=url, device=told.device, model=told.model)


async def _told(url: str, id: str) -> _Told:
    from strata.bench.load.connection import Client
    from strata.bench.load.server import KEY_VARIABLE, fetch

    client = Client(url, os.environ.get(KEY_VARIABLE))
    try:
        return await fetch(client, f"/requests/{quote(id, safe='')}", None, _Told)
    finally:
        client.close()
