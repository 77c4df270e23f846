"""What goes wrong around a running server and inside it, each with the criterion that it is to meet."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from tests.serve.running import Running, is_alive, running, wait_for

IDLE = (0, 0, 0)

# ---- an engine that ends ----


KILLED = (signal.SIGKILL, (), "the engine process was killed by SIGKILL (out of memory?)")
HUNG = (signal.SIGSTOP, ("--engine-timeout", "2"), "it has requests and said nothing for 2 s")


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(("ending", "options", "cause"), [KILLED, HUNG], ids=["killed", "hung"])
def test_an_engine_that_ends_is_told_in_the_stream_by_health_and_by_the_exit_status(
    ending: int, options: tuple[str, ...], cause: str, workers: str
) -> None:
    told = f"the engine is gone: {cause}"
    with running("--api-workers", workers, *options) as server, ThreadPoolExecutor(1) as pool:
        children = server.children()
        with server.stream(max_tokens=1000) as events:
            next(events)
            whole = pool.submit(server.complete, ignore_eos=True, max_tokens=1000)
            wait_for(lambda: server.metric("strata_num_requests_running") == 2, server.output)
            os.kill(server.engine(), ending)
            wait_for(lambda: server.status("/health") == 503, server.output)
            wait_for(lambda: server.http.get("/health").json()["error"]["message"] == told, server.output)
            rest = list(events)
        assert rest[-1]["error"]["code"] == "engine_dead"
        assert set(rest[-1]["error"]) == {"message", "type", "param", "code"}
        assert whole.result().status_code == 503
        assert [rest[-1]["error"]["message"], whole.result().json()["error"]["message"]] == [told] * 2
        assert server.wait() == 1
        assert cause.removesuffix(" (out of memory?)") in server.output()
        wait_for(lambda: not any(map(is_alive, children)))
        assert not server.folder.exists()


@pytest.mark.parametrize(("ending", "options", "cause"), [KILLED, HUNG], ids=["killed", "hung"])
def test_an_engine_that_ends_is_replaced_if_that_is_asked_for(
    ending: int, options: tuple[str, ...], cause: str
) -> None:
    with running("--restart-engine", *options) as server:
        first = server.engine()
        answer = server.complete(temperature=0, max_tokens=20).json()["choices"]
        with server.stream(max_tokens=1000) as events:
            next(events)
            os.kill(first, ending)
            assert list(events)[-1]["error"]["code"] == "engine_dead"
        refused = server.complete(max_tokens=1)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["message"].endswith(f"{cause}; another is being started, ask again")
        wait_for(lambda: server.status("/ready") == 200, server.output)
        assert server.engine() != first
        assert not is_alive(first)
        assert server.complete(temperature=0, max_tokens=20).json()["choices"] == answer
        if ending == signal.SIGKILL:
            second = server.engine()
            os.kill(second, ending)
            wait_for(lambda: server.engine() != second)
            os.kill(server.engine(), ending)  # before it is ready: this could go on for ever
            assert server.wait() == 1


# ---- memory that runs out ----


def test_requests_that_do_not_fit_together_get_the_tokens_that_each_gets_alone() -> None:
    prompts = [f"Count from {number} to" for number in range(4)]

    def tokens(server: Running, prompt: str) -> list[int]:
        fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 80, "return_token_ids": True}
        ids: list[int] = server.complete(prompt=prompt, **fields).json()["choices"][0]["token_ids"]
        return ids

    with running("--num-pages", "12", "--deterministic") as server, ThreadPoolExecutor(len(prompts)) as pool:
        alone = [tokens(server, prompt) for prompt in prompts]
        assert server.metric("strata_num_preemptions_total") == 0
        together = list(pool.map(lambda prompt: tokens(server, prompt), prompts))
        assert server.metric("strata_num_preemptions_total") > 0
        assert together == alone
        assert all(len(ids) == 80 for ids in alone)
        wait_for(lambda: server.load() == IDLE)


# ---- numbers that are none ----


def test_a_row_of_nan_ends_its_request_alone_and_spoils_no_cached_page(broken: Path) -> None:
    sound = "the quick brown fox jumps over the day dog, " * 2
    with running(str(broken), "--served-model-name", "builtin") as server:

        def text(**fields: Any) -> Any:
            return server.complete(prompt=sound, temperature=0, max_tokens=20, ignore_eos=True, **fields).json()

        before = text()["choices"]
        with server.stream(prompt="fox", max_tokens=200) as events:
            next(events)
            lost = server.complete(prompt=sound + "z", max_tokens=5)
            lost_stream = server.complete(prompt=sound + "z", max_tokens=5, stream=True)
            rest = list(events)
        for response in (lost, lost_stream):
            assert response.status_code == 500
            assert "NaN" in response.json()["error"]["message"], server.output()
        assert rest[-1] == {"done": True}
        assert not any("error" in event for event in rest)
        assert text()["choices"] == before
        assert server.metric("strata_corrupted_requests_total") == 2
        wait_for(lambda: server.load() == IDLE)


# ---- more than a request, or a key, may take ----


@pytest.fixture(scope="module")
def bounded() -> Iterator[Running]:
    """A server of two keys, each of which has four requests a minute."""
    environment = {"STRATA_API_KEYS": "a:sk-a,b:sk-b"}
    arguments = ("--request-timeout", "2", "--requests-per-minute", "4")
    with running(*arguments, environment=environment, key="sk-a") as started:
        yield started


def test_a_request_that_takes_too_long_is_ended(bounded: Running) -> None:
    whole = bounded.complete(ignore_eos=True, max_tokens=1000, n=16)  # takes several times as long
    assert (whole.status_code, whole.json()["error"]["code"]) == (408, "timeout")
    with bounded.stream(max_tokens=1000, n=16) as events:
        assert list(events)[-1]["error"]["code"] == "timeout"
    wait_for(lambda: bounded.load() == IDLE)
    assert 'strata_rejects_total{model_name="builtin",reason="deadline"} 2.0' in bounded.http.get("/metrics").text


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
