"""The body of an embeddings request, and what it is answered with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from strata.serve.schema.base import ReplyModel, RequestModel, Unsupported, discriminated_by
from strata.serve.schema.sampling import Ids

MAX_INPUTS = 2048


def _kind_of_input(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


class EmbeddingRequest(RequestModel):
    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS), Tag("texts")]
        | Annotated[Ids, Tag("ids")]
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS), Tag("lists")],
        discriminated_by(_kind_of_input, "input", "Input should be a text, a list of token ids, or a list of either"),
    ]
    """One text, one list of token ids, or a list of either."""
    model: str | None = None
    """One of /v1/models; absent, the first of them."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64 is of little-endian float32; float is the default."""
    pooling: Literal["last", "mean"] | None = None
    """The hidden state of the last token, the default, or the mean of all. (An extension.)"""
    dimensions: Annotated[Any, Unsupported("vectors are as long as the model makes them")] = None
    user: str | None = None
    """Has no effect: who sends a request is known by its key."""


class EmbeddingItem(ReplyModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ReplyModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ReplyModel):
    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
