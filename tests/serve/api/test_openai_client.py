"""OpenAI's own Python client against the built-in model: every endpoint and field, whole and streamed."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

from strata.serve.schema.chat import ChatRequest
from strata.serve.schema.completions import CompletionRequest
from strata.serve.schema.embeddings import EmbeddingRequest
from strata.serve.schema.responses import ResponsesRequest
from tests.serve.live import LiveServer

SUM: Any = [{"role": "user", "content": "What is 47 + 38?"}]
MODEL = "builtin"


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    result: int
    sure: bool


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@pytest.fixture
def client(live: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("create", "known"),
    [
        (OpenAI(api_key="x").chat.completions.create, ChatRequest),
        (OpenAI(api_key="x").completions.create, CompletionRequest),
        (OpenAI(api_key="x").embeddings.create, EmbeddingRequest),
        (OpenAI(api_key="x").responses.create, ResponsesRequest),
    ],
)
def test_each_field_of_the_client_is_taken_or_refused_by_name(create: Any, known: type[BaseModel]) -> None:
    fields = set(inspect.signature(create).parameters) - {"extra_headers", "extra_query", "extra_body", "timeout"}
    assert fields <= set(known.model_fields)


class TestChat:
    def test_every_field(self, client: OpenAI) -> None:
        raw = client.chat.completions.with_raw_response.create(
            messages=[
                {"role": "developer", "content": "Answer."},
                {"role": "user", "content": [{"type": "text", "text": "What is 47 + 38?"}], "name": "me"},
            ],
            model=MODEL,
            frequency_penalty=0.1,
            logit_bias={"5": 1},
            logprobs=True,
            max_completion_tokens=8,
            metadata={"a": "b"},
            modalities=["text"],
            n=2,
            parallel_tool_calls=False,
            presence_penalty=-0.1,
            prompt_cache_key="k",
            prompt_cache_retention="in_memory",
            response_format={"type": "text"},
            safety_identifier="s",
            seed=3,
            service_tier="default",
            stop=["Answer"],
            store=False,
            temperature=0.5,
            tool_choice="none",
            tools=[WEATHER],
            top_logprobs=2,
            top_p=0.9,
            user="u",
            verbosity="medium",
            extra_body={
                "top_k": 20,
                "min_p": 0.01,
                "repetition_penalty": 1.05,
                "min_tokens": 1,
                "ignore_eos": True,
                "stop_token_ids": [2],
                "bad_words": ["nonsense"],
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "return_token_ids": True,
                "priority": 1,
                "add_generation_prompt": True,
                "continue_final_message": False,
            },
        )
        assert raw.headers["x-request-id"]
        reply = raw.parse()
        assert [choice.index for choice in reply.choices] == [0, 1]
        for choice in reply.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
            assert len(choice.token_ids) == len(choice.logprobs.content) <= 8  # type: ignore[attr-defined]
        assert reply.usage is not None
        assert reply.usage.completion_tokens <= 16
        assert reply.usage.prompt_tokens == len(reply.prompt_token_ids)  # type: ignore[attr-defined]
        assert reply.system_fingerprint
        assert reply.service_tier == "default"

    def test_streamed(self, client: OpenAI) -> None:
        whole = client.chat.completions.create(messages=SUM, model=MODEL).choices[0]
        options: Any = {"include_usage": True}
        chunks = list(client.chat.completions.create(messages=SUM, model=MODEL, stream=True, stream_options=options))
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.message.content
        assert chunks[-2].choices[0].finish_reason == whole.finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)

    def test_the_streaming_helper(self, client: OpenAI) -> None:
        with client.chat.completions.stream(messages=SUM, model=MODEL, logprobs=True) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"content.delta", "content.done", "logprobs.content.delta", "chunk"} <= kinds
        assert (final.choices[0].message.content or "").endswith("Answer: 85")

    def test_parsed_into_a_class(self, client: OpenAI) -> None:
        reply = client.chat.completions.parse(messages=SUM, model=MODEL, response_format=Answer, max_tokens=600)
        assert isinstance(reply.choices[0].message.parsed, Answer)
        with client.chat.completions.stream(
            messages=SUM, model=MODEL, response_format=Answer, max_tokens=600
        ) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
    def test_tools(self, client: OpenAI, choice: Any) -> None:
        fields: Any = {"messages": SUM, "model": MODEL, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 200}
        message = client.chat.completions.create(**fields, parallel_tool_calls=False).choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
        with client.chat.completions.stream(**fields, parallel_tool_calls=False) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert streamed.tool_calls is not None
        assert streamed.tool_calls[0].function.arguments == call.function.arguments

    def test_a_reply_is_sent_back(self, client: OpenAI) -> None:
        """The client's own object, with all that it put into it."""
        first = client.chat.completions.create(messages=SUM, model=MODEL).choices[0].message
        for message in (first, first.model_dump(), first.model_dump(exclude_none=True)):
            asked: Any = [*SUM, message, {"role": "user", "content": "Spell the word 'cat'."}]
            assert client.chat.completions.create(messages=asked, model=MODEL, max_tokens=5).choices


class TestCompletions:
    def test_every_field(self, client: OpenAI) -> None:
        reply = client.completions.create(
            model=MODEL,
            prompt=["47 + 38", "2 + 2"],
            best_of=1,
            echo=True,
            frequency_penalty=0.1,
            logit_bias={"5": 1},
            logprobs=2,
            max_tokens=4,
            n=2,
            presence_penalty=0.1,
            seed=1,
            stop=["never"],
            temperature=0.7,
            top_p=0.9,
            user="u",
        )
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        for choice, start in zip(reply.choices, ["47 + 38"] * 2 + ["2 + 2"] * 2, strict=True):
            assert choice.text.startswith(start)
        assert reply.choices[0].logprobs is not None
        assert reply.choices[0].logprobs.token_logprobs is not None
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 16

    def test_streamed(self, client: OpenAI) -> None:
        whole = client.completions.create(model=MODEL, prompt="47 + 38", max_tokens=12)
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(
            client.completions.create(model=MODEL, prompt="47 + 38", max_tokens=12, stream=True, stream_options=options)
        )
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert len(counts) == len(chunks)
        assert counts == sorted(counts)
        assert chunks[-1].choices == []


class TestOthers:
    def test_models(self, client: OpenAI) -> None:
        (model,) = client.models.list()
        assert (model.id, model.object) == (MODEL, "model")
        assert client.models.retrieve(MODEL).max_model_len == 1024  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-5")

    @pytest.mark.parametrize("given", ["one text", ["one text", "another"], [5, 6, 7], [[5, 6], [7]]])
    def test_embeddings(self, client: OpenAI, given: Any) -> None:
        """The client asks for base64 by itself; both forms hold the same numbers."""
        packed = client.embeddings.create(model=MODEL, input=given, user="u")
        plain = client.embeddings.create(model=MODEL, input=given, encoding_format="float")
        assert len(packed.data) == (2 if isinstance(given[0], list) or given == ["one text", "another"] else 1)
        for number, (one, two) in enumerate(zip(packed.data, plain.data, strict=True)):
            assert one.index == two.index == number
            # Of several prompts as many as have come run in one step, and bfloat16 rounds by how many rows it has.
            assert one.embedding == pytest.approx(two.embedding, abs=1e-6 if len(plain.data) == 1 else 5e-3)
            assert math.hypot(*one.embedding) == pytest.approx(1, abs=1e-3)
        assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0

    def test_responses(self, client: OpenAI) -> None:
        first = client.responses.create(
            model=MODEL,
            input="What is 47 + 38?",
            instructions="Answer.",
            max_output_tokens=60,
            metadata={"a": "b"},
            parallel_tool_calls=True,
            service_tier="auto",
            store=True,
            temperature=0,
            text={"format": {"type": "text"}},
            tool_choice="auto",
            top_p=1.0,
            truncation="disabled",
            user="u",
        )
        assert first.status == "completed"
        assert first.output_text
        assert client.responses.retrieve(first.id).output_text == first.output_text
        second = client.responses.create(model=MODEL, input="Why?", previous_response_id=first.id, max_output_tokens=20)
        assert second.previous_response_id == first.id
        assert first.usage is not None
        assert second.usage is not None
        assert second.usage.input_tokens > first.usage.input_tokens
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)

    def test_responses_parsed_and_with_tools(self, client: OpenAI) -> None:
        parsed = client.responses.parse(model=MODEL, input="47 + 38?", text_format=Answer, max_output_tokens=600)
        assert isinstance(parsed.output_parsed, Answer)
        tool: Any = {"type": "function", **WEATHER["function"]}
        called = client.responses.create(
            model=MODEL, input="Weather?", tools=[tool], tool_choice="required", max_output_tokens=200
        )
        assert called.output[0].type == "function_call"

    def test_side_by_side(self, live: LiveServer) -> None:
        """32 streams at once of the asynchronous client: each is what it is alone."""

        async def text(client: AsyncOpenAI, question: str) -> str:
            stream = await client.chat.completions.create(
                messages=[{"role": "user", "content": question}], model=MODEL, stream=True, max_tokens=60
            )
            return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

        async def all_texts() -> list[str]:
            async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
                return await asyncio.gather(
                    *(text(client, f"What is {number} + {number + 3}?") for number in range(20, 52))
                )

        answers = asyncio.run(all_texts())
        assert [answer.rpartition(" ")[2] for answer in answers] == [str(2 * number + 3) for number in range(20, 52)]
