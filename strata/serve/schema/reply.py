"""What the answers of chat completions and completions share: who answers, and how many tokens it took."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import strata
from strata.serve.generation import Generation
from strata.serve.schema.base import ReplyModel

# The same request with the same seed gives the same answer as long as this stays the same.
FINGERPRINT = f"strata-{strata.__version__}"


@dataclass(frozen=True)
class ReplyHead:
    """What every object and every chunk of one answer begins with. created: Unix time, in seconds."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> ReplyHead:
        return cls(f"{prefix}-{uuid4().hex}", int(time.time()), model)

    def fields(self, object: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


class PromptTokensDetails(ReplyModel):
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


class Usage(ReplyModel):
    """In tokens; completion_tokens are those of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(generations: Iterable[Generation], output: bool = True) -> Usage:
    """What these have taken so far. output: False leaves out what they have generated."""
    counts = [(one.prompt_tokens, one.completion_tokens if output else 0, one.cached_tokens) for one in generations]
    prompt, completion, cached = (sum(column) for column in zip(*counts, strict=True))
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )
