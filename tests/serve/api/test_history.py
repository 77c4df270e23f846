"""What clients send back of earlier turns, as their libraries and other servers have filled it in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from strata.serve.schema.chat import ChatRequest
from strata.serve.schema.messages import as_sent
from strata.text.tokenizer import Tokenizer
from tests.serve.scripted import Scripted, delta, scripted_server

Serve = Callable[..., AbstractContextManager[Scripted]]

# As litellm, langchain, pydantic-ai, OpenRouter, vLLM and OpenAI's own client send them.
FOREIGN: dict[str, Any] = {
    "id": "msg_1",
    "provider_specific_fields": {"refusal": None},
    "reasoning": {"effort": "low"},
    "reasoning_details": [{"type": "reasoning.text"}],
    "cache_control": {"type": "ephemeral"},
    "annotations": [],
    "refusal": None,
    "audio": None,
    "function_call": None,
    "parsed": {"a": 1},
    "index": 0,
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}


@pytest.fixture(scope="module")
def served(tokenizer: Tokenizer) -> Iterator[Scripted]:
    settings = {"tool_format": "hermes"}
    with scripted_server(tokenizer, [[delta(0, [], "stop")]], settings=settings) as server:
        yield server


def filled(value: Any) -> Any:
    """The same with foreign fields in each object of it, but not in arguments."""
    if isinstance(value, list):
        return [filled(one) for one in value]
    return {**FOREIGN, **{key: filled(one) for key, one in value.items()}} if isinstance(value, dict) else value


def test_unknown_fields_of_messages_change_nothing(served: Scripted) -> None:
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "2 + 2", "refusal": None},
        {"role": "user", "content": "And?"},
    ]
    served.chat(messages=plain)
    served.chat(messages=filled(plain))
    without, with_fields = served.engine.added
    served.engine.added.clear()
    assert without.prompt == with_fields.prompt


def test_unknown_fields_of_calls_and_their_results_are_taken(served: Scripted) -> None:
    plain = [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "4"}]
    shown = [
        as_sent(ChatRequest.model_validate({"messages": messages}).messages) for messages in (plain, filled(plain))
    ]
    assert shown[0] == shown[1]


def test_unknown_fields_of_items_change_nothing(served: Scripted) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "What is 2 + 2?"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "2 + 2"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
        {"role": "user", "content": "And?"},
    ]
    foreign = {"status": "completed", "phase": "final_answer", "encrypted_content": None, "logprobs": [], **FOREIGN}
    for given in (items, [{**foreign, **one} for one in filled(items)]):
        answer = served.client.post("/v1/responses", json={"input": given, "store": False})
        assert answer.status_code == 200, answer.text
    without, with_fields = served.engine.added
    served.engine.added.clear()
    assert without.prompt == with_fields.prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"provider_specific_fields": {}}, "provider_specific_fields"),
        ({"tools": [{"type": "function", "cache_control": {}, "function": {"name": "f"}}]}, "tools[0].cache_control"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ],
)
def test_what_asks_for_something_is_still_refused(served: Scripted, fields: dict[str, Any], param: str) -> None:
    answer = served.client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **fields}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
