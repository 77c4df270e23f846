"""Requests are let in, or not, before anything costly is done for them; what they cost is counted whatever they get;
turns at helpers."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest

from strata.serve.fair_queue import FairQueue
from strata.serve.http.errors import ApiError
from strata.serve.http.keys import KeyHash
from strata.serve.http.limits import AdmittedRequest, Caller, Limits
from strata.serve.settings import ServeSettings
from strata.text.chat_template import Rendering
from strata.text.spelled_tokens import ChatText
from tests.serve.scripted import EOS, Scripted, Serve, delta
from tests.serve.test_generation import series

DONE = [[delta(0, [EOS], "stop")]]
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


class SlowRenderer:
    """Stands in for AsyncTemplateRenderer: counts, and takes a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.rendered = 0

    async def render(self, rendering: Rendering) -> ChatText:
        self.rendered += 1
        await asyncio.sleep(self.seconds)
        return ChatText("Hi")


def with_renderer(server: Scripted, seconds: float = 0.0) -> SlowRenderer:
    renderer = SlowRenderer(seconds)
    server.state.templates = FairQueue([renderer])  # type: ignore[list-item]
    return renderer


def post(server: Scripted, path: str, body: Any, **headers: str) -> httpx.Response:
    return server.client.post(path, json=body, headers=headers)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True, "response_format": SCHEMA}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/tokenize", CHAT),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_what_is_over_the_rate_is_refused_before_any_work(serve_script: Serve, path: str, body: Any) -> None:
    with serve_script(DONE, settings={"requests_per_minute": 2}) as server:
        for _ in range(2):  # what is wrong counts as well
            assert post(server, "/v1/chat/completions", {"messages": 5}).status_code == 400
        renderer = with_renderer(server)
        server.state.tokenizer = None  # type: ignore[assignment]
        refused = post(server, path, body)
        assert code_of(refused) == (429, "requests_per_minute")
        assert int(refused.headers["retry-after"]) >= 1
        assert renderer.rendered == 0
        assert server.client.post(path, content=b"[" * 5000).status_code == 429  # nor is the body looked at


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/tokenize", CHAT),
    ],
)
def test_tokens_are_held_before_the_template_is_rendered(serve_script: Serve, path: str, body: Any) -> None:
    with serve_script(DONE, settings={"tokens_per_minute": 100}) as server:
        renderer = with_renderer(server)
        assert post(server, "/detokenize", {"tokens": [5] * 100}).status_code == 200
        assert code_of(post(server, path, body)) == (429, "tokens_per_minute")
        assert renderer.rendered == 0


def test_what_is_refused_for_its_length_costs_its_tokens(serve_script: Serve) -> None:
    with serve_script(DONE, settings={"tokens_per_minute": 3000}) as server:
        long = " red" * 2500
        assert code_of(post(server, "/v1/completions", {"prompt": long})) == (400, "context_length_exceeded")
        assert code_of(post(server, "/v1/completions", {"prompt": long})) == (429, "tokens_per_minute")
        assert server.state.limits.in_flight == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a" * 20_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "a" * 20_000]}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 20_000}]}, "messages"),
        ("/v1/responses", {"input": "a" * 20_000}, "input"),
        ("/v1/responses", {"input": "a" * 20_000, "truncation": "auto"}, "input"),
        ("/v1/embeddings", {"input": ["a", "a" * 20_000]}, "input[1]"),
        ("/tokenize", {"prompt": "a" * 20_000}, "prompt"),
    ],
)
def test_what_is_longer_than_all_tokens_could_be_is_not_tokenized(
    serve_script: Serve, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, param: str
) -> None:
    """The model takes 1,024 tokens, of which the longest has 13 characters."""
    with serve_script(DONE) as server:
        server.client.get("/health")
        encode = server.state.tokenizer.encode
        monkeypatch.setattr(
            server.state.tokenizer, "encode", lambda text, add: encode(text, add) if len(text) < 13_313 else 1 / 0
        )
        refused = post(server, path, body)
        assert code_of(refused) == (400, "context_length_exceeded")
        assert refused.json()["error"]["param"] == param
        assert "20" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", {**CHAT, "response_format": {**SCHEMA, "json_schema": {"name": "s", "schema": 5}}}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 5000}),
        ("/v1/completions", {"prompt": ["Hi", "a" * 5000]}),
        ("/v1/embeddings", {"input": ["Hi", ""]}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [5]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}] * 3}),
    ],
)
def test_whatever_a_request_comes_to_its_places_are_free_again(serve_script: Serve, path: str, body: Any) -> None:
    with serve_script(DONE) as server:
        post(server, path, body)
        assert server.state.limits.in_flight == 0


def test_prompts_of_one_request_are_let_in_together_or_not_at_all(serve_script: Serve) -> None:
    settings = {"concurrency": 4, "requests_per_minute": 60, "tokens_per_minute": 1000}
    with serve_script(DONE, settings=settings) as server:
        for _ in range(20):
            refused = post(server, "/v1/completions", {"prompt": ["a"] * 5, "max_tokens": 100})
            assert code_of(refused) == (400, "too_many_sequences")
            assert "4" in refused.json()["error"]["message"]
        assert not server.engine.added
        assert post(server, "/v1/completions", {"prompt": ["a"] * 4, "max_tokens": 200}).status_code == 200
        assert len(server.engine.added) == 4
        assert server.state.limits.in_flight == 0


def test_each_prompt_and_each_input_counts_as_a_request(serve_script: Serve) -> None:
    with serve_script(DONE, settings={"requests_per_minute": 10}) as server:
        server.engine.embed = embed  # type: ignore[attr-defined]
        assert code_of(post(server, "/v1/embeddings", {"input": ["a"] * 11})) == (400, "too_many_requests")
        assert post(server, "/v1/embeddings", {"input": ["a"] * 5}).status_code == 200
        assert code_of(post(server, "/v1/completions", {"prompt": ["a"] * 5})) == (429, "requests_per_minute")
        assert post(server, "/v1/completions", {"prompt": ["a"] * 3}).status_code == 200
        assert code_of(post(server, "/v1/embeddings", {"input": "a"})) == (429, "requests_per_minute")


async def embed(request: Any) -> list[float]:
    return [1.0]


def test_inputs_are_sequences_while_the_engine_has_them(serve_script: Serve) -> None:
    with serve_script(DONE, settings={"concurrency": 3}) as server:
        seen = []

        async def look(request: Any) -> list[float]:
            seen.append(server.state.limits.in_flight)
            return [1.0]

        server.engine.embed = look  # type: ignore[attr-defined]
        assert post(server, "/v1/embeddings", {"input": ["a"] * 10}).status_code == 200
        assert set(seen) == {3}
        assert server.state.limits.in_flight == 0


def test_a_request_is_measured_from_its_arrival(serve_script: Serve) -> None:
    with serve_script(DONE) as server:
        with_renderer(server, seconds=0.3)
        assert post(server, "/v1/chat/completions", CHAT).status_code == 200
        told = series(server)
    assert told["strata_time_to_first_token_seconds_sum"] >= 0.3
    assert told["strata_e2e_request_latency_seconds_sum"] >= 0.3


def test_the_time_of_a_request_begins_at_its_arrival(serve_script: Serve) -> None:
    with serve_script([], hangs=True, settings={"request_timeout": 1.5}) as server:
        with_renderer(server, seconds=1.4)
        start = time.monotonic()
        assert code_of(post(server, "/v1/chat/completions", CHAT)) == (408, "timeout")
        assert time.monotonic() - start < 2.7  # not 1.4 and another 1.5


def test_the_wait_for_a_template_ends_at_the_deadline(serve_script: Serve) -> None:
    with serve_script(DONE, settings={"request_timeout": 0.5}) as server:
        renderer = with_renderer(server, seconds=3.0)
        first = threading.Thread(target=post, args=(server, "/v1/chat/completions", CHAT))
        first.start()
        while not renderer.rendered:
            time.sleep(0.01)
        start = time.monotonic()
        assert code_of(post(server, "/v1/chat/completions", CHAT)) == (408, "timeout")
        assert time.monotonic() - start < 2.5
        first.join()


def test_only_named_keys_may_come_first(serve_script: Serve) -> None:
    keys = [KeyHash.of("alice", "sk-a"), KeyHash.of("bob", "sk-b")]
    with serve_script(DONE, keys=keys, settings={"priority_keys": ("alice",)}) as server:
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/responses", {"input": "Hi"}),
        ):
            for priority, name, status in ((-1, "a", 200), (-1, "b", 403), (0, "b", 200), (5, "b", 200)):
                answer = post(server, path, {**body, "priority": priority}, authorization=f"Bearer sk-{name}")
                assert answer.status_code == status
                if status == 403:
                    assert answer.json()["error"]["param"] == "priority"
    with serve_script(DONE) as server:
        assert post(server, "/v1/completions", {"prompt": "Hi", "priority": -1}).status_code == 403
    with serve_script(DONE, settings={"priority_keys": ("anonymous",)}) as server:
        assert post(server, "/v1/completions", {"prompt": "Hi", "priority": -1}).status_code == 200


def admission(name: str, seconds: float = 600.0) -> AdmittedRequest:
    limits = Limits(ServeSettings("model", ("model",), request_timeout=seconds), 100)
    return limits.admit(Caller(name, ""), 1, 1)


class Work:
    """Pieces of work that last until they are told to end; `begun` has them in the order in which they began."""

    def __init__(self, helpers: int) -> None:
        self.queue = FairQueue([f"helper {number}" for number in range(helpers)])
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    def ask(self, name: str, seconds: float = 600.0) -> asyncio.Task[str]:
        """Ask for a piece of work; the first letter is its caller's."""
        self._ends[name] = asyncio.Event()

        async def work(helper: str) -> str:
            self.begun.append(name)
            await self._ends[name].wait()
            return helper

        return asyncio.create_task(self.queue.run(admission(name[0], seconds), work))

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_one_caller_never_holds_all_helpers() -> None:
    work = Work(helpers=2)
    tasks = [work.ask(f"a{number}") for number in range(5)]
    await settle()
    assert work.begun == ["a0"]
    tasks.append(work.ask("b0"))
    await settle()
    assert work.begun == ["a0", "b0"]
    for name in ("a0", "a1", "a2", "a3", "a4", "b0"):
        await work.end(name)
    assert len({await task for task in tasks}) <= 2


async def test_callers_take_turns_each_with_its_first() -> None:
    work = Work(helpers=1)
    tasks = [work.ask(name) for name in ("a0", "a1", "a2", "b0", "b1", "c0")]
    await settle()
    for name in ("a0", "a1", "b0", "c0", "a2", "b1"):
        assert work.begun[-1] == name
        await work.end(name)
    await asyncio.gather(*tasks)


async def test_a_helper_is_busy_until_its_work_is_done_though_the_asker_has_left() -> None:
    work = Work(helpers=2)
    left = work.ask("a0")
    await settle()
    left.cancel()
    later = work.ask("a1")
    await settle()
    assert work.begun == ["a0"]
    await work.end("a0")
    assert work.begun == ["a0", "a1"]
    await work.end("a1")
    await later


async def test_who_leaves_the_queue_loses_its_turn_and_nobody_elses() -> None:
    work = Work(helpers=1)
    first, second, third = (work.ask(name) for name in ("a0", "a1", "a2"))
    await settle()
    second.cancel()
    await work.end("a0")
    assert work.begun == ["a0", "a2"]
    await work.end("a2")
    await asyncio.gather(first, third)
    # Left at the very moment in which the turn came: the helper goes on to the next.
    fourth, fifth, sixth = (work.ask(name) for name in ("b0", "b1", "b2"))
    await settle()
    work._ends["b0"].set()
    await fourth
    fifth.cancel()
    await settle()
    work._ends["b1"].set()
    await work.end("b2")
    assert await sixth == "helper 0"


async def test_a_turn_that_does_not_come_in_time_is_given_up() -> None:
    work = Work(helpers=1)
    holding = work.ask("a0")
    with pytest.raises(ApiError) as caught:
        await work.ask("b0", seconds=0.05)
    assert (caught.value.status, caught.value.code) == (408, "timeout")
    await work.end("a0")
    assert await holding == "helper 0"


async def test_what_fails_gives_its_helper_back() -> None:
    queue = FairQueue([1])

    async def fails(helper: int) -> None:
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await queue.run(admission("a"), fails)
