"""Where a request's time went, asked in the request, of a running server and of one that has forgotten."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest

from tests.serve.live import LiveServer
from tests.serve.scripted import EOS, Scripted, delta, events

ServeScript = Callable[..., AbstractContextManager[Scripted]]
CHAT = {"messages": [{"role": "user", "content": "What is 47 + 38?"}], "temperature": 0}
LONG = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 700}


def adds_up(ledger: dict[str, Any]) -> dict[str, float]:
    """The parts of its only generation."""
    (one,) = ledger["generations"]
    assert sum(one["parts"].values()) == pytest.approx(one["seconds"], rel=1e-6)
    assert sum(one["first_token_parts"].values()) == pytest.approx(one["time_to_first_token"], rel=1e-6)
    parts: dict[str, float] = one["parts"]
    return parts


def test_the_answer_tells_where_its_time_went(live: LiveServer) -> None:
    shares = []
    for _ in range(5):  # what else this machine does, and only that, differs from one time to the next
        began = time.monotonic()
        answer = live.post("/v1/chat/completions", **CHAT, max_tokens=20, ledger=True)
        took = time.monotonic() - began
        (told,) = answer["ledger"]["generations"]
        shares.append(told["seconds"] / took)
        if shares[-1] > 0.3:
            break
    assert max(shares) > 0.3
    assert max(shares) < 1
    parts = adds_up(answer["ledger"])
    assert {"text", "inbox", "prompt", "decode", "host_gap", "delivery"} <= parts.keys()
    assert told["output_tokens"] == answer["usage"]["completion_tokens"]
    assert told["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["decode_steps"] == told["output_tokens"] - 1
    assert (answer["ledger"]["model"], answer["ledger"]["device"]) == (answer["model"], "cpu")
    asked = live.client.get(f"/requests/{answer['id']}").json()
    assert asked["generations"] == answer["ledger"]["generations"]
    assert live.client.get(f"/requests/{answer['ledger']['id']}").json() == answer["ledger"]


@pytest.mark.parametrize("usage", [False, True])
def test_the_last_chunk_of_a_stream_has_it(live: LiveServer, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "Once upon"})):
        fields = {**body, "stream": True, "max_tokens": 5, "ledger": True, **options}
        text = live.client.post(f"/v1/{path}", json=fields).text
        *chunks, last, done = events(text)
        assert done == "[DONE]"
        assert last["choices"] == []
        assert ("usage" in last) == usage
        assert not any("ledger" in chunk for chunk in chunks)
        adds_up(last["ledger"])


def test_stop_strings_and_several_samples_and_prompts(live: LiveServer) -> None:
    answer = live.post("/v1/completions", prompt="Once upon a time", max_tokens=60, stop=" the", ledger=True)
    adds_up(answer["ledger"])
    assert answer["ledger"]["generations"][0]["finish_reason"] == "stop"
    answer = live.post("/v1/completions", prompt=["One", "Two"], n=2, max_tokens=9, ignore_eos=True, ledger=True)
    assert len(answer["ledger"]["generations"]) == 2
    for one in answer["ledger"]["generations"]:
        assert sum(one["parts"].values()) == pytest.approx(one["seconds"])
        assert one["output_tokens"] == 9


def test_one_that_runs_and_one_whose_client_leaves(live: LiveServer) -> None:
    headers = {"x-request-id": "the-long-one"}
    with live.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        running = live.client.get("/requests/the-long-one").json()
        assert running["generations"][0]["finish_reason"] is None
        assert "decode" in adds_up(running)
    live.wait_until(lambda: live.idle)
    adds_up(ended := live.client.get("/requests/the-long-one").json())
    assert ended["generations"][0]["finish_reason"] == "abort"
    assert ended["generations"][0]["seconds"] > running["generations"][0]["seconds"]


def test_an_unknown_request_and_a_field_that_is_none(live: LiveServer) -> None:
    response = live.client.get("/requests/chatcmpl-nobody")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("request_not_found", "not_found_error")
    assert "chatcmpl-nobody" in error["message"]
    refused = live.client.post("/v1/completions", json={"prompt": "a", "ledger": "yes"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "ledger"


def test_of_a_server_without_ledgers(serve_script: ServeScript) -> None:
    with serve_script([[delta(0, [EOS], "stop")]]) as server:
        answer = server.complete(ledger=True)
        assert answer["ledger"]["generations"] == []
        assert server.engine.streams[0].ended is not None
        assert "ledger" not in server.complete()
        (began, names) = server.engine.added[0].began, server.engine.added[0].names
        assert 0 < began <= server.engine.added[0].arrival
        assert names == [f"anonymous/{answer['ledger']['id']}", f"anonymous/{answer['id']}"]
        server.engine.alive = False
        dead: httpx.Response = server.client.get("/requests/x")
        assert dead.status_code == 404
