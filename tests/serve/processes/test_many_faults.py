"""A body full of faults costs no more than one with a single fault: only the first is told, so no more are sought."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from strata.serve.api.tokens_route import DetokenizeRequest, TokenizeRequest
from strata.serve.http.validation import explain_fault
from strata.serve.schema.base import MAX_FIELDS, RequestModel
from strata.serve.schema.chat import ChatRequest
from strata.serve.schema.completions import CompletionRequest
from strata.serve.schema.embeddings import EmbeddingRequest
from strata.serve.schema.responses import ResponsesRequest

MANY = 2000
USER = [{"role": "user", "content": "Hi"}]
NUMBERED = {f"x{number}": 1 for number in range(MANY)}
NOTHING = [0] * MANY

BODIES: dict[str, tuple[type[RequestModel], dict[str, Any]]] = {
    "messages": (ChatRequest, {"messages": NOTHING}),
    "messages without a role": (ChatRequest, {"messages": [{}] * MANY}),
    "parts": (ChatRequest, {"messages": [{"role": "user", "content": NOTHING}]}),
    "calls": (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": NOTHING}]}),
    "biases": (ChatRequest, {"messages": USER, "logit_bias": NUMBERED}),
    "metadata": (ChatRequest, {"messages": USER, "metadata": NUMBERED}),
    "fields": (ChatRequest, {"messages": USER, **NUMBERED}),
    "fields of a tool": (ChatRequest, {"messages": USER, "tools": [{"type": "function", **NUMBERED}]}),
    "ids of a prompt": (CompletionRequest, {"prompt": [1, *NUMBERED]}),
    "prompts": (CompletionRequest, {"prompt": [[]] * MANY}),
    "inputs": (EmbeddingRequest, {"input": [1, *NUMBERED]}),
    "lists of ids": (EmbeddingRequest, {"input": [[1, *NUMBERED]]}),
    "items": (ResponsesRequest, {"input": NOTHING}),
    "include": (ResponsesRequest, {"input": "Hi", "include": NOTHING}),
    "messages to tokenize": (TokenizeRequest, {"messages": NOTHING}),
    "ids to detokenize": (DetokenizeRequest, {"tokens": list(NUMBERED)}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_full_of_faults_has_few(name: str) -> None:
    model, body = BODIES[name]
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 3


def test_too_many_fields_are_told_as_that() -> None:
    tool = {"type": "function", "function": {"name": "f", **NUMBERED}}
    for body, param in ((NUMBERED, None), ({"messages": USER, "tools": [tool]}, "tools[0].function")):
        with pytest.raises(ValidationError) as caught:
            ChatRequest.model_validate(body)
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in caught.value.errors()]
        message, named, _ = explain_fault(RequestValidationError(faults, body=body))
        assert named == param
        assert message.startswith(f"{param or 'the body'} must have at most {MAX_FIELDS} fields")
