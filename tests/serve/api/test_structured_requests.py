"""What a whole answer has to be, in OpenAI's words and vLLM's, alone and beside tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from strata.serve.grammar_worker import TOKENIZER
from strata.text.tokenizer import Tokenizer
from tests.serve.live import LiveServer
from tests.serve.scripted import Scripted, delta, scripted_server

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= greeting " " name\ngreeting ::= "hello" | "bye"\nname ::= [A-Z] [a-z]*\n'
LARK = 'start: ("hello" | "bye") " " /[A-Z][a-z]*/'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {**SCHEMA, "additionalProperties": False}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Scripted]:
    with scripted_server(tokenizer, [[delta(0, [], "stop")]], settings={"tool_format": "hermes"}) as server:
        yield server


def takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def grammar_of(server: Scripted, path: str, **fields: Any) -> str | None:
    answer = server.client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return server.engine.added.pop().grammar


@pytest.mark.parametrize(
    ("kind", "value", "right", "wrong"),
    [
        ("json", SCHEMA, '{"a": 1}', '{"a": 1, "b": 2}'),
        ("json", json.dumps(SCHEMA), '{"a": 1}', "{}"),
        ("regex", "a+b", "aab", "b"),
        ("choice", ["yes", 'no "really"'], 'no "really"', "no"),
        ("grammar", GBNF, "bye Ann", "bye ann"),
        ("grammar", LARK, "hello Bo", "hello"),
    ],
)
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_way_of_vllm(
    server: Scripted, path: str, older: bool, kind: str, value: Any, right: str, wrong: str
) -> None:
    body: dict[str, Any] = {"prompt": "Hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "Hi"}]}
    fields = {f"guided_{kind}": value} if older else {"structured_outputs": {kind: value}}
    grammar = grammar_of(server, path, **body, **fields)
    assert grammar is not None
    assert takes(grammar, right)
    assert not takes(grammar, wrong)


def test_any_object(server: Scripted) -> None:
    for fields in ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}):
        grammar = grammar_of(server, "/v1/completions", prompt="Hi", **fields)
        assert grammar is not None
        assert takes(grammar, '{"any": [1, {}]}')
        assert not takes(grammar, "[]")


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
RESPONSE = {"input": "Hi", "tools": [{"type": "function", **TOOL["function"]}]}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "response_format": FORM}),
        ("/v1/chat/completions", {**CHAT, "structured_outputs": {"json": SCHEMA}}),
        ("/v1/responses", {**RESPONSE, "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
    ],
)
def test_beside_tools_an_answer_is_of_that_form_or_calls(server: Scripted, path: str, body: dict[str, Any]) -> None:
    taken = {}
    for choice in ("auto", "none", "required"):
        grammar = grammar_of(server, path, **body, tool_choice=choice)
        assert grammar is not None
        taken[choice] = [takes(grammar, text) for text in ('{"a": 1}', CALL, f"{CALL}\n{CALL}", "text", '{"b": 1}')]
    assert taken == {
        "auto": [True, True, True, False, False],
        "none": [True, False, False, False, False],
        "required": [False, True, True, False, False],
    }
    one = grammar_of(server, path, **body, parallel_tool_calls=False)
    assert one is not None
    assert takes(one, CALL)
    assert not takes(one, f"{CALL}\n{CALL}")


def test_text_asks_for_nothing_beside_tools(server: Scripted) -> None:
    assert grammar_of(server, "/v1/chat/completions", **CHAT, response_format={"type": "text"}) is None
    assert grammar_of(server, "/v1/responses", **RESPONSE, text={"format": {"type": "text"}}) is None


def test_a_form_that_the_request_itself_forbids_is_its_own_fault(live: LiveServer) -> None:
    asked = {"prompt": "Hi", "structured_outputs": {"choice": ["0"]}, "bad_words": ["0"]}
    answer = live.client.post("/v1/completions", json=asked)
    assert answer.status_code == 400
    assert "bad_words" in answer.json()["error"]["message"]
    assert live.client.post("/v1/completions", json={**asked, "bad_words": ["1"]}).json()["choices"][0]["text"] == "0"


def test_a_form_that_is_whole_before_min_tokens_is_the_requests_own_fault(live: LiveServer) -> None:
    asked = {"prompt": "Hi", "guided_regex": "", "min_tokens": 4, "max_tokens": 4}
    answer = live.client.post("/v1/completions", json=asked)
    assert answer.status_code == 400, answer.text
    assert "shorter than min_tokens" in answer.json()["error"]["message"]
