"""Streams, event by event: what OpenAI sends, in its order, also when something fails half-way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from strata.engine.process.messages import TokenLogprobs
from strata.serve.client import EngineGone
from strata.serve.schema.chat_reply import ChatChunk
from strata.serve.schema.completions import Completion as CompletionSchema
from strata.text.tokenizer import Tokenizer
from tests.serve.scripted import EOS, Scripted, delta

ServeScript = Callable[..., AbstractContextManager[Scripted]]


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> list[int]:
    """ " red", " blue", " the": a token each."""
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in (" red", " blue", " the")]
    assert all(len(one) == 1 for one in ids)
    return [one[0] for one in ids]


def choices(stream: list[Any], index: int = 0) -> list[Any]:
    """The choices of that index in all chunks, with the fields that never change checked and left out."""
    assert stream[-1] == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in stream[:-1]}) == 1
    return [choice for chunk in stream[:-1] for choice in chunk["choices"] if choice["index"] == index]


def test_the_events_of_a_chat(serve_script: ServeScript, words: list[int]) -> None:
    script = [[delta(0, words[:1])], [delta(0, words[1:])], [delta(0, [EOS], "stop")]]
    with serve_script(script) as server:
        stream = server.stream_chat()
    assert [(choice["delta"], choice["finish_reason"]) for choice in choices(stream)] == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": " red"}, None),
        ({"content": " blue the"}, None),
        ({}, "stop"),
    ]
    for chunk in stream[:-1]:
        assert "usage" not in chunk
        assert chunk["object"] == "chat.completion.chunk"
        ChatChunk.model_validate(chunk)
        ChatCompletionChunk.model_validate(chunk, strict=True)


def test_the_events_of_a_completion(serve_script: ServeScript, words: list[int]) -> None:
    with serve_script([[delta(0, words[:1])], [delta(0, words[1:], "length")]]) as server:
        stream = server.stream_completion()
    assert [(choice["text"], choice["finish_reason"]) for choice in choices(stream)] == [
        (" red", None),
        (" blue the", "length"),
    ]
    for chunk in stream[:-1]:
        assert "usage" not in chunk
        assert chunk["object"] == "text_completion"
        CompletionSchema.model_validate(chunk)


def test_a_stream_says_so_in_its_headers(serve_script: ServeScript, words: list[int]) -> None:
    with serve_script([[delta(0, words, "length")]]) as server:
        response = server.client.post("/v1/completions", json={"prompt": "Hi", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_usage_comes_last_and_is_null_before(serve_script: ServeScript, words: list[int], kind: str) -> None:
    script = [[delta(0, words[:1], scheduled=0.0, cached_tokens=1)], [delta(0, words[1:], "length")]]
    with serve_script(script) as server:
        ask = server.stream_chat if kind == "chat" else server.stream_completion
        *chunks, usage, done = ask(stream_options={"include_usage": True})
        prompt = len(server.engine.added[0].prompt)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_several_samples_side_by_side(serve_script: ServeScript, words: list[int]) -> None:
    script = [
        [delta(1, words[:1]), delta(0, words[1:2])],
        [delta(1, words[2:], "length"), delta(2, words[:1])],
        [delta(0, [EOS], "stop"), delta(2, words[1:2], "length")],
    ]
    with serve_script(script) as server:
        stream = server.stream_chat(n=3)
    assert [chunk["choices"][0]["index"] for chunk in stream[:3]] == [0, 1, 2]
    texts = {
        index: "".join(choice["delta"].get("content", "") for choice in choices(stream, index)) for index in range(3)
    }
    assert texts == {0: " blue", 1: " red the", 2: " red blue"}
    for index, reason in enumerate(["stop", "length", "length"]):
        own = choices(stream, index)
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + [reason]


def test_a_character_of_several_tokens_comes_whole(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    text = "a🙂é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    with serve_script([[delta(0, [id])] for id in ids] + [[delta(0, [], "length")]]) as server:
        stream = server.stream_completion()
    shown = [choice["text"] for choice in choices(stream)]
    assert "".join(shown) == text
    assert "�" not in "".join(shown)
    assert [one for one in shown if one] == list(text)


def test_half_a_character_at_the_end_is_shown_as_such(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", add_special_tokens=False)[:-1]
    with serve_script([[delta(0, ids, "length")]]) as server:
        assert choices(server.stream_completion())[-1]["text"] == "�"


@pytest.mark.parametrize(("include", "text"), [(False, " red blu"), (True, " red blue th")])
def test_a_stop_string_across_tokens(serve_script: ServeScript, words: list[int], include: bool, text: str) -> None:
    """The tokens after it, and what might have been its beginning, are never shown."""
    script = [[delta(0, words[:1])], [delta(0, words[1:2])], [delta(0, [*words[2:], *words])]]
    with serve_script(script) as server:
        stream = server.stream_completion(stop=["never", "e th"], include_stop_str_in_output=include)
        assert server.engine.finished == [(0, "e th")]
    own = choices(stream)
    assert "".join(choice["text"] for choice in own) == text
    assert (own[-1]["finish_reason"], own[-1]["stop_reason"]) == ("stop", "e th")


def test_what_might_begin_a_stop_string_is_held_back(serve_script: ServeScript, words: list[int]) -> None:
    script = [[delta(0, words[:1])], [delta(0, words[1:2])], [delta(0, [EOS], "stop")]]
    with serve_script(script) as server:
        shown = [choice["text"] for choice in choices(server.stream_completion(stop="red blue the"))]
    assert shown == [" ", "red blue"]


def test_log_probabilities_wait_for_the_text_of_their_token(serve_script: ServeScript, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    entries = [TokenLogprobs(id, -0.5, 1, [], []) for id in ids]
    script = [[delta(0, [id], logprobs=[entry])] for id, entry in zip(ids, entries, strict=True)]
    with serve_script([*script, [delta(0, [], "length", logprobs=[])]]) as server:
        stream = server.stream_chat(logprobs=True)
    shown = [choice for choice in choices(stream) if choice["delta"].get("content")]
    assert len(shown) == 1
    told = shown[0]["logprobs"]["content"]
    assert bytes(byte for one in told for byte in one["bytes"]).decode() == "🙂"


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(
    ("fault", "code", "type"),
    [
        (EngineGone("it was killed"), "engine_dead", "service_unavailable_error"),
        ([delta(0, [], "error", error="the logits hold NaN")], "generation_failed", "server_error"),
        (RuntimeError("secret"), "internal_error", "server_error"),
    ],
)
def test_a_fault_half_way_is_told_in_the_stream(
    serve_script: ServeScript, words: list[int], kind: str, fault: Any, code: str, type: str
) -> None:
    with serve_script([[delta(0, words[:1])], fault]) as server:
        stream = server.stream_chat() if kind == "chat" else server.stream_completion()
        assert server.engine.streams[0].closed
        assert server.state.limits.in_flight == 0
        metrics = server.client.get("/metrics").text
    assert 'finished_reason="error",model_name="scripted"} 1.0' in metrics
    assert 'strata_aborts_total{model_name="scripted"} 0.0' in metrics
    assert set(stream[-1]) == {"error"}
    error = stream[-1]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (code, type)
    assert "secret" not in error["message"]


@pytest.mark.parametrize(("fault", "status"), [(EngineGone("it was killed"), 503), (RuntimeError("secret"), 500)])
def test_a_fault_before_the_first_token_has_a_status(serve_script: ServeScript, fault: Exception, status: int) -> None:
    with serve_script([fault]) as server:
        response = server.client.post("/v1/completions", json={"prompt": "Hi", "stream": True})
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert server.state.limits.in_flight == 0


def test_the_deadline_ends_a_stream_with_an_error(serve_script: ServeScript, words: list[int]) -> None:
    with serve_script([[delta(0, words[:1])]], hangs=True, settings={"request_timeout": 1.0}) as server:
        stream = server.stream_completion()
        assert server.engine.streams[0].closed
        assert server.state.limits.in_flight == 0
    assert stream[0]["choices"][0]["text"] == " red"
    assert stream[-1]["error"]["code"] == "timeout"


def test_the_deadline_before_the_first_token_is_a_408(serve_script: ServeScript) -> None:
    with serve_script([], hangs=True, settings={"request_timeout": 0.1}) as server:
        for stream in (False, True):
            response = server.client.post("/v1/completions", json={"prompt": "Hi", "stream": stream})
            assert response.status_code == 408
            assert response.json()["error"]["type"] == "timeout_error"


def test_several_prompts_share_one_stream(serve_script: ServeScript, words: list[int]) -> None:
    script = [[delta(0, words[:1]), delta(1, words[1:2])], [delta(0, words[2:], "length"), delta(1, [EOS], "stop")]]
    with serve_script(script) as server:
        stream = server.stream_completion(prompt=["a", "b"], n=2, echo=True)
        assert len(server.engine.added) == 2
    texts = ["".join(choice["text"] for choice in choices(stream, index)) for index in range(4)]
    assert texts == ["a red the", "a blue", "b red the", "b blue"]


def test_token_ids_are_told_on_request(serve_script: ServeScript, words: list[int]) -> None:
    script = [[delta(0, words[:1])], [delta(0, words[1:], "length")]]
    with serve_script(script) as server:
        chat = server.stream_chat(return_token_ids=True)
        completion = server.stream_completion(return_token_ids=True)
        prompts = [add.prompt for add in server.engine.added]
    for stream in (chat, completion):
        assert [id for choice in choices(stream) for id in choice["token_ids"]] == words
    assert [chunk.get("prompt_token_ids") for chunk in chat[:-1]] == [prompts[0], None, None, None]
    assert [choice.get("prompt_token_ids") for choice in choices(completion)] == [prompts[1], None]
