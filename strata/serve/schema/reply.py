"""What the answers of chat completions and completions have in common; where the time of a request went."""

from __future__ import annotations

from typing import Literal

from strata.engine.watch.request_ledger import Part
from strata.serve.schema.base import ReplyModel


class PromptTokensDetails(ReplyModel):
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


class Usage(ReplyModel):
    """In tokens; completion_tokens are those of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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


class AnswerModel(ReplyModel):
    """An answer, or a chunk of one that is streamed. created: Unix time, in seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    ledger: RequestLedgerReply | None = None
