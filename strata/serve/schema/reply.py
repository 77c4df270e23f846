"""What the answers of chat completions and completions have in common."""

from __future__ import annotations

from strata.serve.schema.base import ReplyModel
from strata.serve.schema.ledger import RequestLedgerReply


class PromptTokensDetails(ReplyModel):
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


class Usage(ReplyModel):
    """In tokens; completion_tokens are those of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AnswerModel(ReplyModel):
    """An answer, or a chunk of one that is streamed. created: Unix time, in seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    ledger: RequestLedgerReply | None = None
