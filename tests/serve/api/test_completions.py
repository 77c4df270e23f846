"""Completions through HTTP as `LLM` completes in this process; echoed prompts with their log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from strata import LLM, SamplingParams
from strata.engine.process.messages import TokenLogprobs
from strata.serve.api.completion_choice import echo_of
from strata.serve.api.prompts import Prompt
from strata.serve.schema.completions import Completion
from strata.serve.schema.completions import Completion as CompletionSchema
from strata.text.tokenizer import Tokenizer
from tests.serve.live import LiveServer
from tests.serve.scripted import EOS, Serve, delta, events, scripted_server

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


def test_a_prompt_that_fills_the_model(live: LiveServer) -> None:
    reply = complete(live, [6] * 1023, max_tokens=1)
    assert reply["usage"] == {
        "prompt_tokens": 1023,
        "completion_tokens": 1,
        "total_tokens": 1024,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


TEXT = "<|user|>a😀é 東京!<|end|><|assistant|>Grüße 🦜"


def entries(ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(id, -0.5, 1, [id, 5], [-0.5, -1.5]) for id in ids]


def served(serve_script: Serve, tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], n: int = 1) -> Any:
    script = [[delta(index, [*output, EOS], "stop", logprobs=entries([*output, EOS])) for index in range(n)]]
    return serve_script(script, prompt_logprobs=entries(prompt[1:]))


def places(text: str, pieces: Sequence[bytes]) -> list[int]:
    """Where each piece of a text's UTF-8 begins: how many characters have ended before it."""
    ends = [len(text[: number + 1].encode()) for number in range(len(text))]
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces))]
    return [sum(end <= start for end in ends) for start in starts]


def test_offsets_count_the_characters_before_a_token(serve_script: Serve, tokenizer: Tokenizer) -> None:
    """Also where a character is several tokens, and where the text spells special tokens."""
    prompt = tokenizer.encode(TEXT, add_special_tokens=False)
    output = tokenizer.encode(" 🦜🦜 ß.", add_special_tokens=False)
    pieces = [tokenizer.token_bytes(id) for id in (*prompt, *output)]
    assert any(len(piece.decode(errors="ignore").encode()) < len(piece) for piece in pieces), "a split character"
    wanted = places(TEXT + " 🦜🦜 ß.", pieces)
    with served(serve_script, tokenizer, prompt, output) as server:
        reply = server.complete(prompt=TEXT, add_special_tokens=False, echo=True, logprobs=1)
        told = reply["choices"][0]["logprobs"]
        assert reply["choices"][0]["text"] == TEXT + " 🦜🦜 ß."
        assert told["text_offset"] == [*wanted, len(TEXT + " 🦜🦜 ß.")]
        chunks = server.stream_completion(prompt=TEXT, add_special_tokens=False, echo=True, logprobs=1)
        parts = [one["choices"][0]["logprobs"] for one in chunks[:-1]]
        assert [offset for part in parts if part for offset in part["text_offset"]] == told["text_offset"]
        alone = server.complete(prompt=TEXT, add_special_tokens=False, logprobs=1)["choices"][0]["logprobs"]
        assert alone["text_offset"] == [offset - len(TEXT) for offset in told["text_offset"][len(prompt) :]]


def test_offsets_of_a_prompt_of_ids_leave_out_what_its_text_does(serve_script: Serve, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXT)
    shown = tokenizer.decode(prompt)
    assert "<|user|>" not in shown
    special = tokenizer.special_ids
    wanted = places(shown, [b"" if id in special else tokenizer.token_bytes(id) for id in prompt])
    with served(serve_script, tokenizer, prompt, []) as server:
        told = server.complete(prompt=prompt, echo=True, logprobs=0)["choices"][0]["logprobs"]
        assert told["text_offset"][: len(prompt)] == wanted


def test_the_prompt_is_worked_out_once_for_all_samples(
    serve_script: Serve, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokenizer.encode(TEXT)
    calls = 0

    def counting(id: int) -> bytes:
        nonlocal calls
        calls += 1
        return Tokenizer.token_bytes(tokenizer, id)

    monkeypatch.setattr(tokenizer, "token_bytes", counting)
    counts, choices = [], []
    for n in (1, 16):
        with served(serve_script, tokenizer, prompt, [], n) as server:
            calls = 0
            reply = server.complete(prompt=TEXT, echo=True, logprobs=1, n=n)
            Completion.model_validate(reply)
            counts.append(calls - n * 10)  # the samples' own
            choices.append(reply["choices"])
    assert counts[1] <= counts[0] + 10
    assert [{**choice, "index": 0} for choice in choices[1]] == choices[0] * 16


def test_an_answer_that_would_repeat_too_much_is_refused(tokenizer: Tokenizer) -> None:
    with scripted_server(tokenizer, [[delta(0, [], "stop")]]) as server:
        fields = {"prompt": [[5] * 1000] * 8, "n": 16, "logprobs": 20, "echo": True, "max_tokens": 1}
        answer = server.client.post("/v1/completions", json=fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "echo", "answer_too_large")
        assert "about 82 MB" in error["message"]
        assert server.engine.added == []


def test_others_get_turns_while_a_long_prompt_is_written(tokenizer: Tokenizer) -> None:
    ids = [5] * 20_000
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def write() -> None:
        beside = asyncio.ensure_future(others())
        part = await echo_of(Prompt("", ids), entries(ids[1:]), tokenizer)
        beside.cancel()
        assert part.logprobs is not None
        assert part.logprobs.text_offset.count(b",") == len(ids) - 1

    asyncio.run(write())
    assert turns > 50


def test_no_tokens_score_the_prompt(serve_script: Serve, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(TEXT)
    with served(serve_script, tokenizer, prompt, [], n=2) as server:
        whole = server.complete(prompt=TEXT, echo=True, logprobs=1, max_tokens=1, n=2)
        reply = server.complete(prompt=TEXT, echo=True, logprobs=1, max_tokens=0, n=2, return_token_ids=True)
        Completion.model_validate(reply)
        for choice, scored in zip(whole["choices"], reply["choices"], strict=True):
            assert scored["text"] == TEXT
            assert scored["finish_reason"] == "length"
            assert scored["token_ids"] == []
            assert scored["logprobs"] == {name: some[: len(prompt)] for name, some in choice["logprobs"].items()}
        assert reply["usage"]["completion_tokens"] == 0
        assert reply["usage"]["total_tokens"] == len(prompt)
        last = server.stream_completion(prompt=TEXT, echo=True, max_tokens=0, n=2)[-2]
        assert last["choices"][0]["finish_reason"] == "length"
        assert [add.params.max_tokens for add in server.engine.added] == [1, 1, 1]
        refused = server.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 0})
        assert refused.status_code == 400
        assert "needs echo" in refused.json()["error"]["message"]
