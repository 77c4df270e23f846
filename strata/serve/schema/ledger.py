"""Where the time of a request went, as clients are told: the engine's ledger, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from strata.engine.watch.request_ledger import PARTS, Part, RequestLedger
from strata.serve.schema.base import ReplyModel


class GenerationLedger(ReplyModel):
    """One prompt's; of several samples the one that ended last."""

    seconds: float
    """From the arrival of the request until this ended, or until now."""
    parts: dict[Part, float]
    """Adds up to `seconds`; what took none is left out. The parts are in docs/observe.md."""
    time_to_first_token: float | None
    """Until the engine knew it; null while there is none."""
    first_token_parts: dict[Part, float]
    finish_reason: str | None
    """Null while it runs."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prompt_steps: int
    """Steps with a part of the prompt."""
    decode_steps: int
    """Steps with a token of it."""
    sequences_beside: float
    """In its decode steps, on average, itself included."""
    preemptions: int
    floor: float | None
    """The least seconds that its steps could take on this device; null where its peaks are not known."""


class RequestLedgerReply(ReplyModel):
    """One request, of several prompts each."""

    object: Literal["request.ledger"]
    id: str
    model: str
    device: str
    """That the engine runs on, as its driver names it; "cpu"."""
    generations: list[GenerationLedger]


def ledger_reply(id: str, model: str, device: str, ledgers: Sequence[RequestLedger]) -> RequestLedgerReply:
    told = [_told(one) for one in ledgers]
    return RequestLedgerReply(object="request.ledger", id=id, model=model, device=device, generations=told)


def _told(ledger: RequestLedger) -> GenerationLedger:
    return GenerationLedger(
        seconds=ledger.seconds,
        parts=_in_order(ledger.parts),
        time_to_first_token=ledger.first_token,
        first_token_parts=_in_order(ledger.first_parts),
        finish_reason=ledger.finish_reason,
        prompt_tokens=ledger.prompt_tokens,
        cached_tokens=ledger.cached_tokens,
        output_tokens=ledger.output_tokens,
        prompt_steps=ledger.prompt_steps,
        decode_steps=ledger.decode_steps,
        sequences_beside=ledger.beside,
        preemptions=ledger.preemptions,
        floor=ledger.floor,
    )


def _in_order(parts: dict[Part, float]) -> dict[Part, float]:
    return {part: parts[part] for part in PARTS if parts.get(part, 0.0) > 0.0}
