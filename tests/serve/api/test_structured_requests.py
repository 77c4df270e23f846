"""What an answer has to be, in OpenAI's words and vLLM's; settings that ask for nothing; errors as OpenAI's client has
them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from llguidance import LLMatcher
from openai import OpenAI

from strata.serve.grammar_worker import TOKENIZER
from strata.serve.http.keys import KeyHash
from strata.text.tokenizer import Tokenizer
from tests.serve.conftest import BUILTIN
from tests.serve.live import LiveServer
from tests.serve.scripted import NAME, Scripted, Serve, delta, scripted_server

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
    server.post(path, **fields)
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


EFFORT = "{{ reasoning_effort | default('none given') }}; {{ enable_thinking | default('not said') }}"


CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi", "store": False},
}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((CHATS, {"reasoning_effort": effort}) for effort in ("none", "minimal", "low", "medium", "high", "xhigh")),
        *((CHATS, {"verbosity": much}) for much in ("low", "medium", "high")),
        (CHATS, {"chat_template_kwargs": {}}),
        (CHATS, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHATS, {"guided_decoding_backend": "xgrammar"}),
        (RESPONSES, {"reasoning": {}}),
        (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}),
        (RESPONSES, {"reasoning": {"effort": None, "generate_summary": None}}),
        (RESPONSES, {"include": []}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}),
        (RESPONSES, {"text": {"verbosity": "low"}}),
        *((COMPLETIONS, fields) for fields in ({"suffix": ""}, {"suffix": None}, {"best_of": 1})),
    ],
)
def test_settings_that_ask_for_nothing(server: Scripted, path: str, fields: dict[str, Any]) -> None:
    for one in (BODIES[path], {**BODIES[path], **fields}):
        server.post(path, **one)
    asked = [(add.prompt, add.params, add.grammar) for add in server.engine.added]
    server.engine.added.clear()
    assert asked[0] == asked[1]


def test_no_top_p_is_the_likeliest_token(server: Scripted) -> None:
    server.complete(top_p=0)
    assert server.engine.added.pop().params.top_p <= 1e-6


def test_what_was_asked_for_is_repeated(server: Scripted) -> None:
    reasoning = {"effort": "low", "summary": "auto"}
    assert server.post("/v1/responses", input="Hi", reasoning=reasoning)["reasoning"] == reasoning
    server.engine.added.clear()


def test_templates_see_the_effort_and_the_variables() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with (
        Tokenizer.load(BUILTIN, chat_template=EFFORT) as tokenizer,
        scripted_server(tokenizer, [[delta(0, [], "stop")]]) as silent,
    ):

        def prompt(path: str, **fields: Any) -> str:
            silent.post(path, **fields)
            return tokenizer.decode(silent.engine.added[-1].prompt)

        chat, responses = "/v1/chat/completions", "/v1/responses"
        assert prompt(chat, messages=messages) == "none given; not said"
        assert prompt(chat, messages=messages, reasoning_effort="low") == "low; not said"
        variables = {"enable_thinking": True, "reasoning_effort": "high"}
        assert prompt(chat, messages=messages, chat_template_kwargs=variables) == "high; True"
        assert prompt(responses, input="Hi", reasoning={"effort": "minimal"}) == "minimal; not said"
        asked = {"messages": messages, "chat_template_kwargs": {"enable_thinking": "maybe", "self": 1}}
        tokens = silent.client.post("/tokenize", json=asked).json()["tokens"]
        assert tokenizer.decode(tokens) == "none given; maybe"


SUM: Any = [{"role": "user", "content": "What is 47 + 38?"}]


def client_of(server: Scripted, *, api_key: str = "none", max_retries: int = 0) -> OpenAI:
    return OpenAI(base_url="http://127.0.0.1/v1", api_key=api_key, max_retries=max_retries, http_client=server.client)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 5}, "temperature", "invalid_value"),
        ({"audio": {"voice": "v", "format": "mp3"}}, "audio", "unsupported_parameter"),
        ({"extra_body": {"foo": 1}}, "foo", "unknown_parameter"),
        ({"max_tokens": 5000}, "max_tokens", "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(serve_script: Serve, fields: Any, param: str, code: str, stream: bool) -> None:
    with serve_script([]) as server, pytest.raises(openai.BadRequestError) as caught:
        client_of(server).chat.completions.create(messages=SUM, model=NAME, stream=stream, **fields)
    error = caught.value
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert error.request_id


def test_keys(serve_script: Serve) -> None:
    with serve_script([[delta(0, [], "stop")]], keys=[KeyHash.of("alice", "sk-alice")]) as server:
        wrong, right = (client_of(server, api_key=key) for key in ("sk-bob", "sk-alice"))
        with pytest.raises(openai.AuthenticationError) as caught:
            wrong.chat.completions.create(messages=SUM, model=NAME)
        assert caught.value.code == "invalid_api_key"
        assert right.chat.completions.create(messages=SUM, model=NAME).choices
        assert server.engine.added[0].salt


def test_it_comes_again_after_the_time_it_is_told(serve_script: Serve) -> None:
    with serve_script([[delta(0, [], "stop")]], settings={"requests_per_minute": 60}) as server:
        impatient = client_of(server)

        def flood() -> None:
            for _ in range(1000):
                impatient.completions.create(prompt="x", model=NAME)

        with pytest.raises(openai.RateLimitError) as caught:
            flood()
        assert 60 <= len(server.engine.added) < 1000
        seconds = int(caught.value.response.headers["retry-after"])
        assert seconds == 1
        patient, took = client_of(server, max_retries=2), 0.0
        while took < 0.5:  # a second may have passed since, and then one is let in at once
            start = time.monotonic()
            assert patient.completions.create(prompt="x", model=NAME).choices
            took = time.monotonic() - start
        assert 0.9 * seconds < took < 30


@pytest.mark.parametrize(
    ("settings", "fields", "alive", "raised", "status", "code"),
    [
        ({}, {"model": "gpt-5"}, True, openai.NotFoundError, 404, "model_not_found"),
        ({"body_limit": 1000}, {"prompt": "x" * 2000}, True, openai.APIStatusError, 413, "body_too_large"),
        ({}, {}, False, openai.InternalServerError, 503, "engine_dead"),
    ],
)
def test_what_the_client_raises(
    serve_script: Serve, settings: Any, fields: Any, alive: bool, raised: type[Exception], status: int, code: str
) -> None:
    with serve_script([], settings=settings) as server:
        server.engine.alive = alive
        with pytest.raises(raised) as caught:
            client_of(server).completions.create(**{"prompt": "x", "model": NAME, **fields})
    assert (caught.value.status_code, caught.value.code) == (status, code)  # type: ignore[attr-defined]


def test_a_fault_half_way_through_a_stream(serve_script: Serve) -> None:
    with serve_script([[delta(0, [5, 6])], RuntimeError("secret")]) as server:
        stream = client_of(server).chat.completions.create(messages=SUM, model=NAME, stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "internal_error"


def test_a_request_that_took_too_long_is_not_sent_again(serve_script: Serve) -> None:
    with serve_script([], hangs=True, settings={"request_timeout": 0.1}) as server:
        with pytest.raises(openai.APIStatusError) as caught:
            client_of(server, max_retries=2).completions.create(prompt="x", model=NAME)
        assert (caught.value.status_code, caught.value.code) == (408, "timeout")
        assert len(server.engine.added) == 1
