"""Completions of the built-in model through HTTP: as `LLM` completes in this process, and as each field asks."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from strata import LLM, SamplingParams
from strata.serve.schema.completions import Completion as CompletionSchema
from strata.text.tokenizer import Tokenizer
from tests.serve.live import LiveServer
from tests.serve.scripted import events

PROMPT = "<|user|>What is 47 + 38?<|end|><|assistant|>"
REVERSE = "<|user|>Reverse the word 'planet'.<|end|><|assistant|>"


def complete(live: LiveServer, prompt: Any = PROMPT, **fields: Any) -> Any:
    reply = live.post("/v1/completions", prompt=prompt, **fields)
    if not (fields.get("echo") and "logprobs" in fields):  # OpenAI sends null for the first token, and does not say so
        Completion.model_validate(reply)
    CompletionSchema.model_validate(reply)
    return reply


def stream(live: LiveServer, prompt: Any = PROMPT, **fields: Any) -> list[Any]:
    response = live.client.post("/v1/completions", json={"prompt": prompt, "stream": True, **fields})
    assert response.status_code == 200, response.text
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in chunk["choices"]]


def texts(reply: Any) -> list[str]:
    return [choice["text"] for choice in reply["choices"]]


def joined(choices: list[Any], index: int) -> str:
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def greedy(llm: LLM, prompt: Any, **params: Any) -> Any:
    return llm.generate([prompt], SamplingParams(temperature=0, **params), use_tqdm=False)[0]


def test_the_completion_is_that_of_llm(live: LiveServer, llm: LLM) -> None:
    expected = greedy(llm, PROMPT, max_tokens=60)
    reply = complete(live, max_tokens=60)
    assert texts(reply) == [expected.outputs[0].text]
    assert reply["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)
    assert joined(stream(live, max_tokens=60), 0) == expected.outputs[0].text


def test_sixteen_tokens_unless_asked_otherwise(live: LiveServer) -> None:
    assert complete(live)["usage"]["completion_tokens"] == 16


def test_each_kind_of_prompt(live: LiveServer, tokenizer: Tokenizer) -> None:
    """A string, ids, and lists of either are the same prompts, and choices count through them."""
    ids = tokenizer.encode(PROMPT)
    (one,) = texts(complete(live))
    assert texts(complete(live, ids)) == [one]
    assert texts(live.post("/v1/completions", prompt_token_ids=ids)) == [one]
    other = tokenizer.encode(REVERSE)
    (two,) = texts(complete(live, other))
    assert one != two
    for prompts in ([PROMPT, REVERSE], [ids, other]):
        reply = complete(live, prompts, n=2)
        assert texts(reply) == [one, one, two, two]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert reply["usage"]["prompt_tokens"] == len(ids) + len(other)
        streamed = stream(live, prompts, n=2)
        assert [joined(streamed, index) for index in range(4)] == texts(reply)


def test_special_tokens_before_the_text(live: LiveServer, tokenizer: Tokenizer) -> None:
    told = complete(live, return_token_ids=True, max_tokens=1)["choices"][0]["prompt_token_ids"]
    assert told == tokenizer.encode(PROMPT)
    told = complete(live, return_token_ids=True, max_tokens=1, add_special_tokens=False)["choices"][0]
    assert told["prompt_token_ids"] == tokenizer.encode(PROMPT, add_special_tokens=False)


def test_echo(live: LiveServer, tokenizer: Tokenizer) -> None:
    (text,) = texts(complete(live, "47 + 38"))
    assert texts(complete(live, "47 + 38", echo=True, n=2)) == ["47 + 38" + text] * 2
    assert joined(stream(live, "47 + 38", echo=True), 0) == "47 + 38" + text
    assert texts(complete(live, tokenizer.encode("47 + 38"), echo=True)) == ["47 + 38" + text]


def test_log_probabilities_are_those_of_llm(live: LiveServer, llm: LLM) -> None:
    expected = greedy(llm, "47 + 38", max_tokens=6, logprobs=2, prompt_logprobs=2)
    told = complete(live, "47 + 38", max_tokens=6, logprobs=2, echo=True)["choices"][0]["logprobs"]
    entries = expected.prompt_logprobs[1:] + expected.outputs[0].logprobs
    ids = expected.prompt_token_ids[1:] + expected.outputs[0].token_ids
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert len(told["tokens"]) == 1 + len(ids)
    for number, (id, entry) in enumerate(zip(ids, entries, strict=True), 1):
        assert told["tokens"][number] == entry[id].decoded_token
        assert told["token_logprobs"][number] == pytest.approx(entry[id].logprob, abs=1e-3)
        assert set(told["top_logprobs"][number]) == {one.decoded_token for one in entry.values()}
    text = "47 + 38" + expected.outputs[0].text
    for token, offset in zip(told["tokens"][1:], told["text_offset"][1:], strict=True):
        assert text[offset : offset + len(token)] == token


def test_streamed_log_probabilities_add_up(live: LiveServer) -> None:
    fields = {"max_tokens": 6, "logprobs": 1, "echo": True}
    whole = complete(live, "47 + 38", **fields)["choices"][0]["logprobs"]
    parts = [choice["logprobs"] for choice in stream(live, "47 + 38", **fields) if choice["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for part in parts for value in part[name]] == whole[name]


def test_no_log_probabilities_unless_asked(live: LiveServer) -> None:
    assert complete(live, max_tokens=1)["choices"][0]["logprobs"] is None
    zero = complete(live, max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert [len(top) for top in zero["top_logprobs"]] == [1, 1]


def test_openai_spelled_out_nulls_and_ones(live: LiveServer) -> None:
    reply = complete(live, max_tokens=2, best_of=1, suffix="", logprobs=None, echo=False, user="u", stream=False)
    assert reply["object"] == "text_completion"


def test_a_prompt_that_fills_the_model(live: LiveServer) -> None:
    reply = complete(live, [6] * 1023, max_tokens=1)
    assert reply["usage"] == {
        "prompt_tokens": 1023,
        "completion_tokens": 1,
        "total_tokens": 1024,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
