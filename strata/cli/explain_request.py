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
    generations: list[_Ledger]


def request_explained(url: str, id: str) -> Explanation:
    """Of several prompts in one request that which ended last. Raises ValueError if the server does not answer, or does
    not know the request."""
    from strata.plan.explain.one_request import explain_request

    if not id.strip():
        raise ValueError(
            f"--request {id!r} names none: give the id of an answer, like chatcmpl-..., or its x-request-id"
        )
    ledgers = asyncio.run(_ledgers(url, id))
    if not ledgers:
        raise ValueError(f"the engine of request {id} has ended, and its ledger with it")
    longest = max(ledgers, key=lambda ledger: ledger.seconds)
    return explain_request(longest, name=id, server=url)


async def _ledgers(url: str, id: str) -> list[_Ledger]:
    from strata.bench.load.connection import Client
    from strata.bench.load.server import KEY_VARIABLE, fetch

    client = Client(url, os.environ.get(KEY_VARIABLE))
    try:
        return (await fetch(client, f"/requests/{quote(id, safe='')}", None, _Told)).generations
    finally:
        client.close()
