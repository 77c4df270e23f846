"""Chat completions of the built-in model through HTTP: as `LLM` answers in this process, and as each field asks."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from strata import LLM, SamplingParams
from strata.serve.schema.chat_reply import ChatCompletion as ChatCompletionSchema
from tests.serve.live import LiveServer
from tests.serve.scripted import events

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
