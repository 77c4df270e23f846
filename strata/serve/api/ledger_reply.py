"""The ledger of a request in its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Request

from strata.serve.generation import Generation
from strata.serve.schema.ledger import RequestLedgerReply, ledger_reply
from strata.serve.schema.reply import Usage
from strata.serve.state import request_id_of, server_of


async def ledger_of(request: Request, generations: Sequence[Generation]) -> RequestLedgerReply:
    """Of generations that have ended; those whose engine has ended too are left out."""
    found = await asyncio.gather(*(generation.ledger() for generation in generations))
    state, known = server_of(request), [ledger for ledger in found if ledger is not None]
    return ledger_reply(request_id_of(request), state.model_name(None), state.client.ready.device, known)


def last_chunk(start: bytes, usage: Usage | None, ledger: RequestLedgerReply | None) -> bytes:
    """The last event of a stream, which has no choices, with what was asked for; empty if nothing was. start: of the
    event."""
    told = b"" if usage is None else b',"usage":' + usage.model_dump_json().encode()
    if ledger is not None:
        told += b',"ledger":' + ledger.model_dump_json().encode()
    return start + b',"choices":[]' + told + b"}\n\n" if told else b""
