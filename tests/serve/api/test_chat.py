"""Chats through HTTP as `LLM` answers in this process, and streams event by event, also when something fails."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from strata import LLM, SamplingParams
from strata.engine.process.messages import TokenLogprobs
from strata.serve.client import EngineGone
from strata.serve.schema.chat_reply import ChatChunk
from strata.serve.schema.chat_reply import ChatCompletion as ChatCompletionSchema
from strata.serve.schema.completions import Completion as CompletionSchema
from strata.text.tokenizer import Tokenizer
from tests.serve.live import LiveServer
from tests.serve.scripted import EOS, Serve, delta, events

QUESTIONS = ["What is 47 + 38?", "Reverse the word 'planet'.", "Sort these numbers: 42, 7, 93, 18, 65"]
SUM = [{"role": "user", "content": QUESTIONS[0]}]
STORY = [{"role": "user", "content": "Tell me a story."}]


def chat(live: LiveServer, messages: list[dict[str, Any]] = SUM, **fields: Any) -> Any:
    reply = live.post("/v1/chat/completions", messages=messages, **fields)
    ChatCompletion.model_validate(reply, strict=True)
    ChatCompletionSchema.model_validate(reply)
    return reply


def stream(live: LiveServer, messages: list[dict[str, Any]] = SUM, **fields: Any) -> list[Any]:
    body = {"messages": messages, "stream": True, **fields}
    response = live.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return chunks


def content(reply: Any, index: int = 0) -> str:
    text: str = reply["choices"][index]["message"]["content"]
    return text


def joined(chunks: list[Any], index: int = 0) -> str:
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in own)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_that_of_llm(live: LiveServer, llm: LLM, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    expected = llm.chat(messages, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)[0]
    reply = chat(live, messages, temperature=0, max_completion_tokens=200)
    assert content(reply) == expected.outputs[0].text
    assert reply["choices"][0]["finish_reason"] == expected.outputs[0].finish_reason
    assert reply["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert reply["usage"]["completion_tokens"] == len(expected.outputs[0].token_ids)
    assert joined(stream(live, messages, temperature=0, max_tokens=200)) == content(reply)


def test_fields_not_given_are_as_the_model_has_them(live: LiveServer) -> None:
    """Its generation_config.json says that it is greedy."""
    assert content(chat(live)) == content(chat(live)) == content(chat(live, temperature=0))
    assert content(chat(live)).endswith("Answer: 85")


def test_the_final_message_is_written_on(live: LiveServer) -> None:
    begun = [*SUM, {"role": "assistant", "content": "ones: 7 + 8 = 15, write 5,"}]
    reply = chat(live, begun, continue_final_message=True)
    assert content(reply).startswith(" carry 1")
    assert content(reply).endswith("Answer: 85")


def test_no_generation_prompt(live: LiveServer) -> None:
    ids = chat(live, add_generation_prompt=False, return_token_ids=True, max_tokens=1)["prompt_token_ids"]
    assert ids == chat(live, return_token_ids=True, max_tokens=1)["prompt_token_ids"][: len(ids)]


def test_log_probabilities_are_those_of_llm(live: LiveServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
    expected = llm.chat(SUM, params, use_tqdm=False)[0].outputs[0]
    assert expected.logprobs is not None
    fields = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    whole = chat(live, **fields)["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for chunk in stream(live, **fields)
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert len(whole) == len(expected.token_ids)
    for told, entry, id in zip(whole, expected.logprobs, expected.token_ids, strict=True):
        assert told["logprob"] == pytest.approx(entry[id].logprob, abs=1e-3)
        assert told["token"] == entry[id].decoded_token
        assert bytes(told["bytes"]).decode() == told["token"]
        likeliest = sorted(entry.values(), key=lambda one: one.rank or 0)[:3]
        assert [one["token"] for one in told["top_logprobs"]] == [one.decoded_token for one in likeliest]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]


def test_several_samples(live: LiveServer) -> None:
    fields = {"n": 3, "temperature": 1.5, "seed": 7, "max_tokens": 24}
    reply = chat(live, STORY, **fields)
    texts = [content(reply, index) for index in range(3)]
    assert len(set(texts)) == 3
    chunks = stream(live, STORY, **fields)
    assert [joined(chunks, index) for index in range(3)] == texts
    assert reply["usage"]["completion_tokens"] <= 72


def test_stop_strings(live: LiveServer) -> None:
    whole = content(chat(live))
    reply = chat(live, stop=["carry 1\ntens", "never"])
    assert content(reply) == whole[: whole.index("carry 1\ntens")]
    assert (reply["choices"][0]["finish_reason"], reply["choices"][0]["stop_reason"]) == ("stop", "carry 1\ntens")
    kept = chat(live, stop="carry 1\ntens", include_stop_str_in_output=True)
    assert content(kept) == content(reply) + "carry 1\ntens"
    assert joined(stream(live, stop="carry 1\ntens")) == content(reply)


def test_lengths(live: LiveServer) -> None:
    cut = chat(live, max_tokens=4)
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 4)
    full = chat(live, max_completion_tokens=60, ignore_eos=True)
    assert (full["choices"][0]["finish_reason"], full["usage"]["completion_tokens"]) == ("length", 60)
    longer = chat(live, min_tokens=50, max_tokens=80)
    assert longer["usage"]["completion_tokens"] >= 50


def test_without_max_tokens_the_model_is_filled(live: LiveServer) -> None:
    reply = chat(live, [{"role": "user", "content": "Say it. " * 250}], ignore_eos=True)
    assert reply["usage"]["total_tokens"] == 1024
    assert reply["choices"][0]["finish_reason"] == "length"


def test_tokens_are_forced_forbidden_and_stopped_at(live: LiveServer) -> None:
    ids = chat(live, return_token_ids=True, max_tokens=6)["choices"][0]["token_ids"]
    forced = chat(live, logit_bias={str(ids[4]): 100}, return_token_ids=True, max_tokens=3)
    assert forced["choices"][0]["token_ids"] == [ids[4]] * 3
    stopped = chat(live, stop_token_ids=[ids[3]], return_token_ids=True)
    assert stopped["choices"][0]["token_ids"] == ids[:4]
    assert stopped["choices"][0]["stop_reason"] == ids[3]
    assert "ones" not in content(chat(live, bad_words=["ones"], max_tokens=20))


def test_penalties_and_filters_reach_the_engine(live: LiveServer, llm: LLM) -> None:
    values = {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "max_tokens": 30,
    }
    expected = llm.chat(SUM, SamplingParams(**values), use_tqdm=False)[0].outputs[0].text  # type: ignore[arg-type]
    assert content(chat(live, **values)) == expected
    assert expected != content(chat(live))


def test_special_tokens_are_shown_on_request(live: LiveServer) -> None:
    assert content(chat(live, skip_special_tokens=False, include_stop_str_in_output=True)).endswith("85<|end|>")


def test_a_prefix_is_cached_for_the_next_request(live: LiveServer) -> None:
    asked = [{"role": "user", "content": "Spell the word 'lantern' backwards. " * 8}]
    first, second = (chat(live, asked, max_tokens=1)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 64


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


def test_the_events_of_a_chat(serve_script: Serve, words: list[int]) -> None:
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


def test_the_events_of_a_completion(serve_script: Serve, words: list[int]) -> None:
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


def test_a_stream_says_so_in_its_headers(serve_script: Serve, words: list[int]) -> None:
    with serve_script([[delta(0, words, "length")]]) as server:
        response = server.client.post("/v1/completions", json={"prompt": "Hi", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_usage_comes_last_and_is_null_before(serve_script: Serve, words: list[int], kind: str) -> None:
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


def test_several_samples_side_by_side(serve_script: Serve, words: list[int]) -> None:
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


def test_a_character_of_several_tokens_comes_whole(serve_script: Serve, tokenizer: Tokenizer) -> None:
    text = "a🙂é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)
    with serve_script([[delta(0, [id])] for id in ids] + [[delta(0, [], "length")]]) as server:
        stream = server.stream_completion()
    shown = [choice["text"] for choice in choices(stream)]
    assert "".join(shown) == text
    assert "�" not in "".join(shown)
    assert [one for one in shown if one] == list(text)


def test_half_a_character_at_the_end_is_shown_as_such(serve_script: Serve, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", add_special_tokens=False)[:-1]
    with serve_script([[delta(0, ids, "length")]]) as server:
        assert choices(server.stream_completion())[-1]["text"] == "�"


@pytest.mark.parametrize(("include", "text"), [(False, " red blu"), (True, " red blue th")])
def test_a_stop_string_across_tokens(serve_script: Serve, words: list[int], include: bool, text: str) -> None:
    """The tokens after it, and what might have been its beginning, are never shown."""
    script = [[delta(0, words[:1])], [delta(0, words[1:2])], [delta(0, [*words[2:], *words])]]
    with serve_script(script) as server:
        stream = server.stream_completion(stop=["never", "e th"], include_stop_str_in_output=include)
        assert server.engine.finished == [(0, "e th")]
    own = choices(stream)
    assert "".join(choice["text"] for choice in own) == text
    assert (own[-1]["finish_reason"], own[-1]["stop_reason"]) == ("stop", "e th")


def test_what_might_begin_a_stop_string_is_held_back(serve_script: Serve, words: list[int]) -> None:
    script = [[delta(0, words[:1])], [delta(0, words[1:2])], [delta(0, [EOS], "stop")]]
    with serve_script(script) as server:
        shown = [choice["text"] for choice in choices(server.stream_completion(stop="red blue the"))]
    assert shown == [" ", "red blue"]


def test_log_probabilities_wait_for_the_text_of_their_token(serve_script: Serve, tokenizer: Tokenizer) -> None:
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
    serve_script: Serve, words: list[int], kind: str, fault: Any, code: str, type: str
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
def test_a_fault_before_the_first_token_has_a_status(serve_script: Serve, fault: Exception, status: int) -> None:
    with serve_script([fault]) as server:
        told = server.post("/v1/completions", status, prompt="Hi", stream=True)
        assert set(told["error"]) == {"message", "type", "param", "code"}
        assert server.state.limits.in_flight == 0


def test_the_deadline_ends_a_stream_with_an_error(serve_script: Serve, words: list[int]) -> None:
    with serve_script([[delta(0, words[:1])]], hangs=True, settings={"request_timeout": 1.0}) as server:
        stream = server.stream_completion()
        assert server.engine.streams[0].closed
        assert server.state.limits.in_flight == 0
    assert stream[0]["choices"][0]["text"] == " red"
    assert stream[-1]["error"]["code"] == "timeout"


def test_the_deadline_before_the_first_token_is_a_408(serve_script: Serve) -> None:
    with serve_script([], hangs=True, settings={"request_timeout": 0.1}) as server:
        for stream in (False, True):
            told = server.post("/v1/completions", 408, prompt="Hi", stream=stream)
            assert told["error"]["type"] == "timeout_error"


def test_several_prompts_share_one_stream(serve_script: Serve, words: list[int]) -> None:
    script = [[delta(0, words[:1]), delta(1, words[1:2])], [delta(0, words[2:], "length"), delta(1, [EOS], "stop")]]
    with serve_script(script) as server:
        stream = server.stream_completion(prompt=["a", "b"], n=2, echo=True)
        assert len(server.engine.added) == 2
    texts = ["".join(choice["text"] for choice in choices(stream, index)) for index in range(4)]
    assert texts == ["a red the", "a blue", "b red the", "b blue"]


def test_token_ids_are_told_on_request(serve_script: Serve, words: list[int]) -> None:
    script = [[delta(0, words[:1])], [delta(0, words[1:], "length")]]
    with serve_script(script) as server:
        chat = server.stream_chat(return_token_ids=True)
        completion = server.stream_completion(return_token_ids=True)
        prompts = [add.prompt for add in server.engine.added]
    for stream in (chat, completion):
        assert [id for choice in choices(stream) for id in choice["token_ids"]] == words
    assert [chunk.get("prompt_token_ids") for chunk in chat[:-1]] == [prompts[0], None, None, None]
    assert [choice.get("prompt_token_ids") for choice in choices(completion)] == [prompts[1], None]
