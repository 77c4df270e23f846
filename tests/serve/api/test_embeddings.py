"""/v1/embeddings, /tokenize and /detokenize: every form of input, both encodings, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import re
import struct
from typing import Any

import pytest

from strata.engine.process.messages import Embed
from strata.serve.client import EngineGone, EngineRefused
from strata.text.tokenizer import Tokenizer
from tests.serve.conftest import BUILTIN
from tests.serve.scripted import Scripted, Serve


class Embedder:
    """The part of an engine's client that embeds: a vector is (its prompt's length, 1 for mean and 0 for last).

    most: how many it was asked for at once.
    """

    def __init__(self, fails: Exception | None = None, hangs: bool = False) -> None:
        self.asked: list[Embed] = []
        self.cancelled = 0
        self.most = 0
        self._now = 0
        self._fails = fails
        self._hangs = hangs

    async def embed(self, request: Embed) -> list[float]:
        self.asked.append(request)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(100 if self._hangs else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self._now -= 1
        if self._fails is not None:
            raise self._fails
        return [len(request.prompt), float(request.pooling == "mean")]


def install(served: Scripted, **options: Any) -> Embedder:
    embedder = Embedder(**options)
    served.engine.embed = embedder.embed  # type: ignore[attr-defined]
    return embedder


@pytest.mark.parametrize("input", ["Hi there", ["Hi there", "you"], [5, 6, 7], [[5, 6, 7], [8]]])
def test_every_form_of_input_gives_a_vector_each(serve_script: Serve, tokenizer: Tokenizer, input: Any) -> None:
    alone = isinstance(input, str) or isinstance(input[0], int)
    prompts = [tokenizer.encode(one) if isinstance(one, str) else one for one in ([input] if alone else input)]
    with serve_script([]) as served:
        embedder = install(served)
        body = served.post("/v1/embeddings", input=input)
        counted = served.client.get("/metrics").text
    assert [request.prompt for request in embedder.asked] == prompts
    totals = re.findall(r"^strata_(?:caller_)?prompt_tokens_total\{.* (\S+)$", counted, re.MULTILINE)
    assert [float(total) for total in totals] == [sum(map(len, prompts))] * 2
    assert [(one["index"], one["embedding"]) for one in body["data"]] == [
        (index, [float(len(prompt)), 0.0]) for index, prompt in enumerate(prompts)
    ]
    tokens = sum(map(len, prompts))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["object"], body["model"]) == ("list", "scripted")


def test_base64_is_of_little_endian_float32(serve_script: Serve) -> None:
    with serve_script([]) as served:
        install(served)
        data = served.post("/v1/embeddings", input=[5, 6, 7], encoding_format="base64", pooling="mean", user="u")[
            "data"
        ]
    assert struct.unpack("<2f", base64.b64decode(data[0]["embedding"])) == (3.0, 1.0)


def test_many_inputs_are_asked_for_a_few_at_a_time_and_keep_their_order(serve_script: Serve) -> None:
    with serve_script([]) as served:
        embedder = install(served)
        data = served.post("/v1/embeddings", input=[[5] * length for length in range(1, 101)])["data"]
        assert served.state.limits.in_flight == 0
    assert [one["embedding"][0] for one in data] == list(range(1, 101))
    assert 1 < embedder.most <= 8


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(EngineRefused("too long for one step"), 400, None), (EngineGone("killed"), 503, "engine_dead")],
)
def test_what_the_engine_says_reaches_the_client(
    serve_script: Serve, failure: Exception, status: int, code: str | None
) -> None:
    with serve_script([]) as served:
        install(served, fails=failure)
        error = served.post("/v1/embeddings", status, input=["a", "b"])["error"]
        assert served.state.limits.in_flight == 0
    assert str(failure) in error["message"]
    assert error["code"] == code


def test_what_takes_too_long_is_ended_everywhere(serve_script: Serve) -> None:
    with serve_script([], settings={"request_timeout": 1.0}) as served:
        embedder = install(served, hangs=True)
        error = served.post("/v1/embeddings", 408, input=["a"] * 20)["error"]
        assert served.state.limits.in_flight == 0
    assert error["code"] == "timeout"
    assert embedder.cancelled == len(embedder.asked) == 8


MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_prompt_becomes_ids_and_they_become_it_again(serve_script: Serve, tokenizer: Tokenizer) -> None:
    text = "Größe: 東京 🙂 " * 300  # long enough for a thread
    with serve_script([]) as served:
        plain = served.post("/tokenize", prompt=text, add_special_tokens=False)
        special = served.post("/tokenize", prompt=text)
        assert served.post("/detokenize", tokens=plain["tokens"]) == {"prompt": text}
        assert served.post("/detokenize", tokens=special["tokens"]) == {"prompt": f"<|begin|>{text}"}
    assert plain == {
        "tokens": tokenizer.encode(text, add_special_tokens=False),
        "count": len(plain["tokens"]),
        "max_model_len": 1024,
        "token_strs": None,
    }
    assert special["tokens"] == [tokenizer.bos_id, *plain["tokens"]]


def test_messages_become_what_a_chat_would_be(serve_script: Serve, tokenizer: Tokenizer) -> None:
    with serve_script([]) as served:
        open_end = served.post("/tokenize", messages=MESSAGES, return_token_strs=True)
        closed = served.post("/tokenize", messages=MESSAGES, add_generation_prompt=False)
        continued = served.post("/tokenize", messages=MESSAGES, continue_final_message=True)
    assert open_end["tokens"] == tokenizer.encode_chat(MESSAGES)
    assert open_end["token_strs"] == [tokenizer.token(id) for id in open_end["tokens"]]
    assert tokenizer.decode(closed["tokens"], skip_special_tokens=False) == "<|begin|><|user|>Hi<|end|>"
    assert tokenizer.decode(continued["tokens"], skip_special_tokens=False) == "<|begin|><|user|>Hi"


def test_tools_are_shown_to_the_template(serve_script: Serve) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    with serve_script([]) as served, Tokenizer.load(BUILTIN, chat_template=template) as served.state.tokenizer:
        ids = served.post("/tokenize", messages=MESSAGES, tools=[tool])["tokens"]
        assert served.state.tokenizer.decode(ids) == "add"
