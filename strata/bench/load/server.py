"""What a load generator must know of the server first: that it is there, what it serves, which tokens it has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from strata.bench.load.answer import refusal_message
from strata.bench.load.connection import ConnectionCut, HttpClient
from strata.bench.load.request_sets import Ask
from strata.bench.load.send import LoadRequest, send_all

KEY_VARIABLE = "STRATA_API_KEY"
# Patience with one request that is no part of the load, in seconds.
PATIENCE = 120.0
# Distinct token ids of a text that random prompts need: of fewer, they could be alike.
FEWEST_IDS = 10

T = TypeVar("T")


class ServedModel(msgspec.Struct, frozen=True):
    """A model that a server offers. max_model_len: most tokens of prompt and output, None if it does not say."""

    name: str = msgspec.field(name="id")
    max_model_len: int | None = None


async def find_model(client: HttpClient, name: str | None) -> ServedModel:
    """The model of that name, or the first that the server offers. Raises ValueError without a server or model."""
    served = (await fetch(client, "/v1/models", None, _Models)).data
    if not served:
        raise ValueError(f"the server at {client.url} offers no model")
    found = served[0] if name is None else next((model for model in served if model.name == name), None)
    if found is None:
        offered = ", ".join(model.name for model in served)
        raise ValueError(f"the server at {client.url} has no model {name!r}: --model is one of {offered}")
    return found


async def text_ids(client: HttpClient, model: str) -> list[int]:
    """The distinct token ids of a random text: ids that the server's vocabulary has and that are not special.

    Raises ValueError if there are so few that prompts drawn from them would be alike.
    """
    rng = random.Random(0)
    words = ("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(2000))
    question = {"model": model, "prompt": " ".join(words), "add_special_tokens": False}
    ids = sorted(set((await fetch(client, "/tokenize", question, _Tokens)).tokens))
    if len(ids) < FEWEST_IDS:
        raise ValueError(
            f"the tokenizer of {client.url} makes {len(ids)} distinct tokens of 2,000 random words, with which prompts "
            f"would be alike and found in the prefix cache: serve the model with one that knows words (at least "
            f"{FEWEST_IDS} of them), or give --dataset a file of prompts"
        )
    return ids


async def as_chats(client: HttpClient, model: str, asks: Sequence[Ask]) -> list[Ask]:
    """Prompts as chats of one message: their text, or the text of their ids, whose number that keeps about the same."""
    chats = []
    for ask in asks:
        prompt = ask.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            prompt = (await fetch(client, "/detokenize", {"model": model, "tokens": prompt}, _Text)).prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chats.append(replace(ask, prompt=messages))
    return chats


async def try_one(client: HttpClient, request: LoadRequest) -> None:
    """Send one request before the load. Raises ValueError with what the server has against it."""
    (outcome,) = await send_all(client, [request], [0.0], max_concurrency=None, timeout=PATIENCE)
    if outcome.fault is not None:
        raise ValueError(f"{client.url}{request.path} failed ({outcome.fault.kind}): {outcome.fault.message}")


async def fetch(client: HttpClient, path: str, question: object, answer: type[T]) -> T:
    """What a server answers: to a GET, or to a POST of `question` unless that is None. Raises ValueError, saying what
    to do, if it does not answer, refuses, or says something else."""
    try:
        status, body = await client.call(path, question)
    except (OSError, ConnectionCut) as error:
        raise ValueError(
            f"no server answers at {client.url} ({error}): start one with `strata serve`, or give its --url"
        ) from None
    if status == 401:
        raise ValueError(f"the server at {client.url} wants an API key: set {KEY_VARIABLE} ({refusal_message(body)})")
    if status != 200:
        raise ValueError(f"{client.url}{path} answered HTTP {status}: {refusal_message(body)}")
    try:
        return msgspec.json.decode(body, type=answer)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{client.url}{path} answered something else than expected: {error}") from None


class _Models(msgspec.Struct):
    data: list[ServedModel]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str
