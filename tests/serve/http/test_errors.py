"""Requests that cannot be served: a 4xx in OpenAI's shape that names the field, and never a 5xx."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.models.folder import BUILTIN_FOLDER
from strata.text.tokenizer import Tokenizer
from tests.serve.scripted import NAME, Scripted, delta, scripted_server

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
CHOICES = ("/v1/chat/completions", "/v1/completions")
BODIES = {CHOICES[0]: {"messages": [USER]}, CHOICES[1]: {"prompt": "Hi"}, "/v1/responses": {"input": "Hi"}}
HUGE = 10**400
# Those of Python, pydantic, msgspec and regular expressions; a client knows JSON.
FOREIGN_WORDS = re.compile(
    r"\b(None|True|False|dict|dictionary|instance|codec|boolean|pattern|truncated|malformed|validation|str|int|float)\b"
    r"|a valid (string|integer|number|list)|'[a-z_]+'|\$[.\[]"
)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Scripted]:
    with scripted_server(tokenizer, [[delta(0, [], "stop")]]) as server:
        yield server


def error_of(response: Any, status: int, foreign: re.Pattern[str] = FOREIGN_WORDS) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    assert not foreign.search(error["message"]), error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


Case = tuple[dict[str, Any], str | None]


def each(values: dict[str, list[Any]]) -> list[Case]:
    """A case for each value of each field, which its error names."""
    return [({name: value}, name) for name, several in values.items() for value in several]


BOTH: list[Case] = each(
    {
        "n": [0, 17, 10**9, "2", True, 1.0],
        "max_tokens": [0, -1, HUGE, 1025],
        "temperature": [-0.1, 2.1, "1", True],
        "top_p": [-0.1, 1.5],
        "top_k": [-2, 1.5],
        "min_p": [1.01],
        "repetition_penalty": [0, 1e-30],
        "presence_penalty": [2.5],
        "frequency_penalty": [-3],
        "seed": [2**63, "x"],
        "stop": ["", ["a", ""], ["a"] * 17, "a" * 257, {"a": 1}],
        "stop_token_ids": [[4096]],
        "logit_bias": [{"4096": 1}, [1]],
        "bad_words": ["a"],
        "ignore_eos": [1],
        "priority": [10**6],
        "stream": ["true"],
        "stream_options": [{"include_usage": True}],
        "user": [5],
        "model": [5],
        "unheard_of": [1],
        "structured_outputs": [
            {},
            {"json_object": False},
            {"regex": "a", "choice": ["a"]},
            {"regex": "("},
            {"json": "{"},
            {"grammar": "root ::= ("},
            {"grammar": "x" * 17000},
        ],
        "guided_json": [{"type": "text"}],
        "guided_whitespace_pattern": [" "],
    }
)
BOTH += [
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"x": {}}}, "logit_bias.x"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice[0]"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"lark": "x"}}, "structured_outputs.lark"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
]

CHAT: list[Case] = each(
    {
        "messages": [None, [], "Hi"],
        "max_completion_tokens": [0],
        "logprobs": [5],
        "top_logprobs": [2],
        "response_format": ["json"],
        "tools": [[TOOL] * 129],
        "tool_choice": ["required"],
        "functions": [[{"name": "f"}]],
        "function_call": ["auto"],
        "audio": [{"voice": "x", "format": "mp3"}],
        "modalities": [["text", "audio"]],
        "prediction": [{"type": "content", "content": "x"}],
        "reasoning_effort": ["a lot"],
        "verbosity": ["none"],
        "prompt_cache_options": [{"mode": "explicit"}],
        "web_search_options": [{}],
        "moderation": [{"model": "x"}],
        "service_tier": ["flex"],
        "chat_template": ["{{ 1 }}"],
        "chat_template_kwargs": [[]],
    }
)
CHAT += [
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "Hi", "name": "f"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}]}, "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    ({"tools": [{"type": "function", "cache_control": {}, "function": {"name": "f"}}]}, "tools[0].cache_control"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL]}, "tools"),  # this server has no format for tool calls
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
]

COMPLETIONS: list[Case] = each(
    {
        "prompt": [None, [], [[]], [1, "a"], [True], {"a": 1}, ["a"] * 129, [4096]],
        "logprobs": [21, True],
        "echo": ["yes"],
        "best_of": [2],
        "suffix": ["end"],
        "messages": [[USER]],
    }
)
COMPLETIONS += [
    ({"prompt": [2**31]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"prompt": "a", "prompt_token_ids": [5]}, "prompt"),
    ({"prompt": [5] * 1024}, None),
]


RESPONSES: list[Case] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]"),
    ({"input": [{"type": ["message"]}]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id"),
    ({"unknown": 1}, "unknown"),
    ({"reasoning": {"effort": "a lot"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "none"}}, "text.verbosity"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"include": ["reasoning.encrypted_content"], "top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"truncation": "middle"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [ADD, ADD]}, "tools[1]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"input": "\ud800"}, None),
]
EMBEDDINGS: list[Case] = [
    ({}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input[0]"),
    ({"input": [True]}, "input[0]"),
    ({"input": ["a", 5]}, "input[1]"),
    ({"input": [5, "a"]}, "input[1]"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": [10**6]}, "input"),
    ({"input": [5] * 1025}, "input"),
    ({"input": ["a", [5] * 3]}, "input[1]"),
    ({"input": "a", "dimensions": 8}, "dimensions"),
    ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "unknown": 1}, "unknown"),
]
TOKENIZE: list[Case] = [
    ({}, "prompt"),
    ({"prompt": "a", "messages": [USER]}, "prompt"),
    ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": "a", "unknown": 1}, "unknown"),
]
DETOKENIZE: list[Case] = [
    ({}, "tokens"),
    ({"tokens": [-1]}, "tokens[0]"),
    ({"tokens": [10**6]}, "tokens"),
    ({"tokens": ["5"]}, "tokens[0]"),
]


def _id(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, dict) else ""


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (path, fields, param)
        for path, cases in {
            "/v1/chat/completions": BOTH + CHAT,
            "/v1/completions": BOTH + COMPLETIONS,
            "/v1/responses": RESPONSES,
            "/v1/embeddings": EMBEDDINGS,
            "/tokenize": TOKENIZE,
            "/detokenize": DETOKENIZE,
        }.items()
        for fields, param in cases
    ],
    ids=_id,
)
def test_what_is_wrong_is_refused_with_its_field(
    server: Scripted, path: str, fields: dict[str, Any], param: str | None
) -> None:
    body = {**BODIES.get(path, {}), **fields}
    answer = server.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = error_of(answer, 400, FOREIGN_WORDS if path in CHOICES else re.compile("Input should|validation"))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert server.engine.added == []


@pytest.mark.parametrize("path", CHOICES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\x00",
        b"[" * 1_000_000,
        b'{"prompt": ' + b'{"a": ' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'"messages"',
        b"null",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"metadata": ' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_body_that_is_no_json_object(server: Scripted, path: str, body: bytes) -> None:
    response = server.client.post(path, content=body, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] is None


def test_a_body_that_is_not_called_json(server: Scripted) -> None:
    error = error_of(server.client.post("/v1/completions", content=b'{"prompt": "Hi"}'), 400)
    assert "Content-Type: application/json" in error["message"]


def test_a_conversation_that_the_template_refuses(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_FOLDER / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('tools say nothing here') }}")
    with Tokenizer.load(tmp_path) as tokenizer, scripted_server(tokenizer, []) as server:
        error = error_of(server.client.post("/v1/chat/completions", json={"messages": [USER]}), 400)
    assert error["param"] == "messages"
    assert "tools say nothing here" in error["message"]
    assert not server.engine.added


def test_deep_arguments_of_an_earlier_call_are_shown_as_they_are(server: Scripted) -> None:
    """So they are too long, like any other text; reading them would go deeper than any stack."""
    deep = {**CALL, "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [USER, {"role": "assistant", "content": "x", "tool_calls": [deep]}, USER]
    error = error_of(server.client.post("/v1/chat/completions", json={"messages": messages}), 400)
    assert error["code"] == "context_length_exceeded"
    assert not server.engine.added


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_model(server: Scripted, path: str) -> None:
    error = error_of(server.client.post(path, json={"model": "gpt-5", **BODIES[path]}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert NAME in error["message"]


def test_a_prompt_that_does_not_fit_tells_both_numbers(server: Scripted) -> None:
    error = error_of(server.client.post("/v1/completions", json={"prompt": [5] * 1500, "max_tokens": 7}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "1024" in error["message"]
    assert "1500" in error["message"]


def test_unknown_paths_and_methods(server: Scripted) -> None:
    assert error_of(server.client.get("/v2/models"), 404)["code"] == "unknown_url"
    assert error_of(server.client.get("/v1/models/"), 404)["type"] == "not_found_error"
    assert error_of(server.client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    refused = server.client.get("/v1/chat/completions")
    assert error_of(refused, 405)["code"] == "method_not_allowed"
    assert refused.headers["allow"] == "POST"
    assert server.client.put("/v1/responses/resp_1").headers["allow"] == "DELETE, GET"  # two routes


def test_a_fault_of_our_own_leaks_nothing(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the secret is 1234")

    monkeypatch.setattr(server.engine, "submit", broken)
    for stream in (False, True):
        response = server.client.post("/v1/completions", json={"prompt": "Hi", "stream": stream})
        error = error_of(response, 500)
        assert error["type"] == "server_error"
        assert "1234" not in response.text
        assert server.state.limits.in_flight == 0


def test_null_is_as_absent(server: Scripted) -> None:
    nulls = {
        name: None
        for name, field in server.client.get("/openapi.json")
        .json()["components"]["schemas"]["ChatRequest"]["properties"]
        .items()
        if name != "messages"
    }
    assert len(nulls) > 40
    server.chat(**nulls)
    server.chat()
    given, absent = server.engine.added
    assert given.params == absent.params
    assert given.prompt == absent.prompt
    server.engine.added.clear()


def test_rejections_are_counted(server: Scripted) -> None:
    def counted() -> float:
        lines = server.state.metrics.render(server.engine.statistics).decode().splitlines()
        return sum(
            float(one.split()[-1]) for one in lines if one.startswith("strata_rejects_total") and "invalid" in one
        )

    before = counted()
    for _ in range(3):
        error_of(server.client.post("/v1/chat/completions", json={"model": NAME, "messages": []}), 400)
    assert counted() == before + 3
