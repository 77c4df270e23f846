"""Settings that clients send of themselves and that ask this server for nothing are taken, and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from strata.text.tokenizer import Tokenizer
from tests.serve.conftest import BUILTIN
from tests.serve.scripted import Scripted, delta, scripted_server

EFFORT = "{{ reasoning_effort | default('none given') }}; {{ enable_thinking | default('not said') }}"


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Scripted]:
    with scripted_server(tokenizer, [[delta(0, [], "stop")]]) as server:
        yield server


def same(server: Scripted, path: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    for one in (body, {**body, **fields}):
        answer = server.client.post(path, json=one)
        assert answer.status_code == 200, answer.text
    without, with_fields = server.engine.added
    server.engine.added.clear()
    assert (without.prompt, without.params, without.grammar) == (
        with_fields.prompt,
        with_fields.params,
        with_fields.grammar,
    )


@pytest.mark.parametrize(
    "fields",
    [
        *({"reasoning_effort": effort} for effort in ("none", "minimal", "low", "medium", "high", "xhigh")),
        *({"verbosity": much} for much in ("low", "medium", "high")),
        {"chat_template_kwargs": {}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"guided_decoding_backend": "xgrammar"},
    ],
)
def test_of_chats(server: Scripted, fields: dict[str, Any]) -> None:
    same(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {}},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"reasoning": {"effort": None, "generate_summary": None}},
        {"include": []},
        {"include": ["reasoning.encrypted_content"]},
        {"text": {"verbosity": "low"}},
    ],
)
def test_of_responses(server: Scripted, fields: dict[str, Any]) -> None:
    same(server, "/v1/responses", {"input": "Hi", "store": False}, fields)


@pytest.mark.parametrize("fields", [{"suffix": ""}, {"suffix": None}, {"best_of": 1}])
def test_of_completions(server: Scripted, fields: dict[str, Any]) -> None:
    same(server, "/v1/completions", {"prompt": "Hi"}, fields)


def test_no_top_p_is_the_likeliest_token(server: Scripted) -> None:
    server.complete(top_p=0)
    assert server.engine.added.pop().params.top_p <= 1e-6


def test_what_was_asked_for_is_repeated(server: Scripted) -> None:
    reasoning = {"effort": "low", "summary": "auto"}
    answer = server.client.post("/v1/responses", json={"input": "Hi", "reasoning": reasoning}).json()
    assert answer["reasoning"] == reasoning
    server.engine.added.clear()


def test_templates_see_the_effort_and_the_variables() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with (
        Tokenizer.load(BUILTIN, chat_template=EFFORT) as tokenizer,
        scripted_server(tokenizer, [[delta(0, [], "stop")]]) as server,
    ):

        def prompt(path: str, **fields: Any) -> str:
            answer = server.client.post(path, json=fields)
            assert answer.status_code == 200, answer.text
            return tokenizer.decode(server.engine.added[-1].prompt)

        chat, responses = "/v1/chat/completions", "/v1/responses"
        assert prompt(chat, messages=messages) == "none given; not said"
        assert prompt(chat, messages=messages, reasoning_effort="low") == "low; not said"
        variables = {"enable_thinking": True, "reasoning_effort": "high"}
        assert prompt(chat, messages=messages, chat_template_kwargs=variables) == "high; True"
        assert prompt(responses, input="Hi", reasoning={"effort": "minimal"}) == "minimal; not said"
        asked = {"messages": messages, "chat_template_kwargs": {"enable_thinking": "maybe", "self": 1}}
        tokens = server.client.post("/tokenize", json=asked).json()["tokens"]
        assert tokenizer.decode(tokens) == "none given; maybe"
