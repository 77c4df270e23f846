"""OpenAI's Python client: every endpoint and field, streamed and not, on the built-in model, which is greedy."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.conftest import KEY
from tests.serve.running import Running, wait_for

MODEL = "builtin"
MESSAGES: Any = [{"role": "user", "content": "What is 47 + 38?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story."}]


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


SCHEMA = Weather.model_json_schema()
CHAT_TOOL: Any = {"type": "function", "function": {"name": "forecast", "description": "Weather.", "parameters": SCHEMA}}
RESPONSE_TOOL: Any = {"type": "function", "name": "forecast", "parameters": SCHEMA, "strict": True}
NAMED: Any = {"type": "function", "function": {"name": "forecast"}}


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def content(chunks: Iterable[Any], index: int = 0) -> str:
    own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in own)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == 1024


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES)
    assert raw.headers["x-request-id"]
    whole = raw.parse()
    (choice,) = whole.choices
    assert choice.message.content
    assert choice.message.content.endswith("Answer: 85")
    assert choice.finish_reason == "stop"
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options=options))
    assert content(chunks) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage
    assert whole.usage
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None and chunk.id == chunks[0].id for chunk in chunks[:-1])
    assert chunks[0].id.startswith("chatcmpl-")


def test_usage_so_far_comes_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts)
    assert len(counts) > 5


def test_the_sampling_fields_of_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": STORY,
        "n": 3,
        "seed": 7,
        "temperature": 1.5,
        "top_p": 0.95,
        "max_completion_tokens": 12,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": -100},
        "user": "u",
        "extra_body": {
            "top_k": 50,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 12,
            "stop_token_ids": [7],
            "bad_words": ["goose"],
            "return_token_ids": True,
            "priority": 1,
        },
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    texts = [choice.message.content for choice in whole.choices]
    assert [content(chunks, index) for index in range(3)] == texts
    assert len(set(texts)) > 1
    assert not any("goose" in text for text in texts)
    for choice in whole.choices:
        assert len(choice.model_dump()["token_ids"]) == 12
        assert len(choice.logprobs.content) == 12
        assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in choice.logprobs.content)
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    assert sum(len(logprobs.content) for logprobs in streamed) == 36


def test_stop_strings(client: openai.OpenAI) -> None:
    stop = ["write 5", "never"]
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=stop)
    chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=stop, stream=True)
    assert (whole.choices[0].message.content or "").endswith(", ")
    assert content(chunks) == whole.choices[0].message.content


def test_the_formats_of_a_chat(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Weather)
    assert isinstance(parsed.choices[0].message.parsed, Weather)
    any_object: Any = {"type": "json_object"}
    asked: Any = {"model": MODEL, "messages": MESSAGES, "response_format": any_object, "max_tokens": 200}
    chunks = list(client.chat.completions.create(**asked, temperature=0, stream=True))
    if chunks[-1].choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content(chunks)), dict)
    assert content(chunks).startswith("{")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_the_tools_of_a_chat(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": [CHAT_TOOL], "tool_choice": choice}
    whole = client.chat.completions.create(**asked, parallel_tool_calls=False)
    (call,) = whole.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "forecast"
    Weather.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    (again,) = streamed.choices[0].message.tool_calls or ()
    assert again.function.arguments == call.function.arguments


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_that_need_not_be_called(client: openai.OpenAI, choice: Any) -> None:
    """The built-in model's template shows no tools, so it answers as if there were none."""
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[CHAT_TOOL], tool_choice=choice)
    assert (whole.choices[0].message.content or "").endswith("Answer: 85")
    assert whole.choices[0].message.tool_calls is None


def test_completions(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": MODEL,
        "prompt": ["Once upon", "The"],
        "max_tokens": 8,
        "n": 2,
        "echo": True,
        "logprobs": 2,
        "seed": 3,
        "temperature": 1,
    }
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True))
    assert [choice.text.startswith("Once upon") for choice in whole.choices] == [True, True, False, False]
    for choice in whole.choices:
        own = [part.text for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(own) == choice.text
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert all(len(top) <= 3 for top in (choice.logprobs.top_logprobs or [])[1:])
    ids = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=2)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", suffix="b")
    assert refused.value.param == "suffix"


def test_a_response_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "What is 47 + 38?", "metadata": {"a": "b"}}
    whole = client.responses.create(**asked)
    assert whole.status == "completed"
    assert whole.output_text.endswith("85")
    assert whole.metadata == {"a": "b"}
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    with client.responses.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == whole.output_text
    assert {"response.created", "response.in_progress", "response.output_item.added", "response.completed"} <= kinds


def test_responses_are_kept_gone_on_from_and_forgotten(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="What is 47 + 38?")
    second = client.responses.create(model=MODEL, input="And 3 + 4?", previous_response_id=first.id)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    unkept = client.responses.create(model=MODEL, input=MESSAGES, store=False, max_output_tokens=3)
    assert (unkept.status, unkept.incomplete_details and unkept.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="a", previous_response_id=unkept.id)


def test_the_tools_and_formats_of_responses(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "Oslo?", "tools": [RESPONSE_TOOL], "tool_choice": "required"}
    (call,) = client.responses.create(**asked, parallel_tool_calls=False).output
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)
    events = list(client.responses.create(**asked, parallel_tool_calls=False, stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    parsed = client.responses.parse(model=MODEL, input="Oslo?", text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    include: Any = ["message.output_text.logprobs"]
    told = client.responses.create(model=MODEL, input="Hello", include=include, top_logprobs=2, max_output_tokens=4)
    part = told.output[0].content[0]  # type: ignore[union-attr, index]
    assert len(part.logprobs) == 4  # type: ignore[union-attr, arg-type]


def test_embeddings(client: openai.OpenAI) -> None:
    texts = ["What is 47 + 38?", "Reverse the word planet."]
    packed = client.embeddings.create(model=MODEL, input=texts)  # this client asks for base64
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-3)
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    last = client.embeddings.create(model=MODEL, input=[5, 6, 7])
    mean = client.embeddings.create(model=MODEL, input=[[5, 6, 7]], extra_body={"pooling": "mean"})
    assert last.data[0].embedding != mean.data[0].embedding
    assert mean.usage.prompt_tokens == 3


def test_tokens_there_and_back(server: Running, client: openai.OpenAI) -> None:
    told = server.http.post("/tokenize", json={"messages": MESSAGES}).json()
    asked = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=1)
    assert asked.usage is not None
    assert told["count"] == len(told["tokens"]) == asked.usage.prompt_tokens
    text = server.http.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]
    assert "What is 47 + 38?" in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "kind", "param", "code"),
    [
        ({"model": "gpt"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": []}, openai.BadRequestError, "messages", None),
        ({"n": 17}, openai.BadRequestError, "n", None),
        ({"top_logprobs": 21, "logprobs": True}, openai.BadRequestError, "top_logprobs", None),
        ({"modalities": ["audio"]}, openai.BadRequestError, "modalities", None),
        ({"extra_body": {"unknown": 1}}, openai.BadRequestError, "unknown", None),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
    ],
)
def test_errors_have_their_class_field_and_code(
    client: openai.OpenAI, asked: Any, kind: Any, param: str, code: str | None, stream: bool
) -> None:
    with pytest.raises(kind) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **asked}, stream=stream)
    assert raised.value.param == param
    assert code is None or raised.value.code == code


def test_a_wrong_key_is_told(server: Running) -> None:
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_a_stream_that_is_left_ends_at_the_server(server: Running, client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    aborts = server.metric("strata_aborts_total")
    with client.chat.completions.create(**asked, stream=True) as stream:
        assert any(chunk.choices[0].delta.content for chunk in stream)
    wait_for(lambda: server.metric("strata_aborts_total") == aborts + 1, seconds=10)
    wait_for(lambda: server.metric("strata_num_requests_running") == 0, seconds=10)


def test_the_asynchronous_client_asks_many_at_once(server: Running) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            questions = [
                client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=20) for _ in range(8)
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*questions)]

    answers = asyncio.run(ask())
    assert answers[0]
    assert set(answers) == {answers[0]}
