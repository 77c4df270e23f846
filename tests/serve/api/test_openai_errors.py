"""What OpenAI's own Python client makes of errors: which exception, with which fields, and whether it tries again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from openai import OpenAI

from strata.serve.http.keys import KeyHash
from tests.serve.scripted import NAME, Scripted, delta

ServeScript = Callable[..., AbstractContextManager[Scripted]]

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
def test_bad_requests(serve_script: ServeScript, fields: Any, param: str, code: str, stream: bool) -> None:
    with serve_script([]) as server, pytest.raises(openai.BadRequestError) as caught:
        client_of(server).chat.completions.create(messages=SUM, model=NAME, stream=stream, **fields)
    error = caught.value
    assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
    assert error.request_id


def test_unknown_model(serve_script: ServeScript) -> None:
    with serve_script([]) as server, pytest.raises(openai.NotFoundError) as caught:
        client_of(server).chat.completions.create(messages=SUM, model="gpt-5")
    assert caught.value.code == "model_not_found"


def test_keys(serve_script: ServeScript) -> None:
    with serve_script([[delta(0, [], "stop")]], keys=[KeyHash.of("alice", "sk-alice")]) as server:
        wrong, right = (client_of(server, api_key=key) for key in ("sk-bob", "sk-alice"))
        with pytest.raises(openai.AuthenticationError) as caught:
            wrong.chat.completions.create(messages=SUM, model=NAME)
        assert caught.value.code == "invalid_api_key"
        assert right.chat.completions.create(messages=SUM, model=NAME).choices
        assert server.engine.added[0].salt


def test_too_large(serve_script: ServeScript) -> None:
    with serve_script([], settings={"body_limit": 1000}) as server:
        with pytest.raises(openai.APIStatusError) as caught:
            client_of(server).completions.create(prompt="x" * 2000, model=NAME)
        assert caught.value.status_code == 413


def test_it_comes_again_after_the_time_it_is_told(serve_script: ServeScript) -> None:
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


def test_a_dead_engine(serve_script: ServeScript) -> None:
    with serve_script([]) as server:
        server.engine.alive = False
        with pytest.raises(openai.InternalServerError) as caught:
            client_of(server).completions.create(prompt="x", model=NAME)
        assert (caught.value.status_code, caught.value.code) == (503, "engine_dead")


def test_a_fault_half_way_through_a_stream(serve_script: ServeScript) -> None:
    with serve_script([[delta(0, [5, 6])], RuntimeError("secret")]) as server:
        stream = client_of(server).chat.completions.create(messages=SUM, model=NAME, stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "internal_error"


def test_a_request_that_took_too_long_is_not_sent_again(serve_script: ServeScript) -> None:
    with serve_script([], hangs=True, settings={"request_timeout": 0.1}) as server:
        with pytest.raises(openai.APIStatusError) as caught:
            client_of(server, max_retries=2).completions.create(prompt="x", model=NAME)
        assert (caught.value.status_code, caught.value.code) == (408, "timeout")
        assert len(server.engine.added) == 1
