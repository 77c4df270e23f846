"""Prompts as token ids: templates rendered in their processes, long texts tokenized off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack

from strata.engine.bad_words import TIMES_ENCODED, bad_word_ids
from strata.engine.sampling_params import SamplingParams
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest
from strata.serve.state import ServerState
from strata.text.chat_template import ChatOptions
from strata.text.messages import text_of
from strata.text.spelled_tokens import ChatText

Result = TypeVar("Result")

# Tokenizing this many characters takes a millisecond or two; to hand them to a thread and back takes a tenth of one.
_SHORT = 4000


@dataclass(frozen=True)
class Prompt:
    """text: empty where it is neither given nor shown."""

    text: str
    ids: list[int]


async def chat_prompt(
    state: ServerState,
    admission: AdmittedRequest,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_special_tokens: bool = False,
    param: str = "messages",
    rendered: Callable[[str], None] = lambda text: None,
    **options: Unpack[ChatOptions],
) -> Prompt:
    """What the model's chat template makes of the messages.

    Raises ApiError (400) if it refuses them, or if what others than the model have said is longer than it could take.
    add_special_tokens: besides those that the template writes. param: what the messages are called in the request.
    rendered: is told of the text before it is encoded, which may refuse it.
    """
    said = (text_of(message.get("content")) for message in messages if message.get("role") != "assistant")
    _check_length(state, sum(map(len, said)), param)
    try:
        asked = state.tokenizer.rendering(messages, **options)
        text = await state.templates.run(admission, lambda renderer: renderer.render(asked))
    except ValueError as error:
        raise ApiError(400, str(error), param=param, code="chat_template_failed") from None
    rendered(text.text)
    ids = await encode(state, admission, text, add_special_tokens=add_special_tokens, param=param)
    return Prompt(text.text, ids)


async def encode(
    state: ServerState,
    admission: AdmittedRequest,
    text: str | ChatText,
    *,
    add_special_tokens: bool = True,
    param: str = "prompt",
) -> list[int]:
    """The token ids of a text. Raises ApiError (400) for a text that has none."""
    (ids,) = await encode_all(state, admission, {param: text}, add_special_tokens=add_special_tokens)
    return ids


async def encode_all(
    state: ServerState,
    admission: AdmittedRequest,
    texts: Mapping[str, str | ChatText],
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """The token ids of several texts, by the parameter that each is.

    Raises ApiError (400) for a text that has none, or is longer than as many tokens as the model takes.
    """
    for param, text in texts.items():
        _check_length(state, len(text), param)

    def encoded() -> list[list[int]]:
        return [_encoded(state, text, add_special_tokens, param) for param, text in texts.items()]

    return await off_the_loop(state, admission, sum(map(len, texts.values())), encoded)


async def bad_words_of(state: ServerState, admission: AdmittedRequest, params: SamplingParams) -> list[tuple[int, ...]]:
    """The token ids of the words that an output must not hold."""
    words = params.bad_words or ()
    if not words:
        return []
    size = TIMES_ENCODED * sum(map(len, words))
    return await off_the_loop(state, admission, size, lambda: bad_word_ids(words, state.tokenizer))


async def off_the_loop(state: ServerState, admission: AdmittedRequest, size: int, work: Callable[[], Result]) -> Result:
    """What `work` with the tokenizer gives. size: characters or ids; where they are many a thread does it, in turn."""
    if size <= _SHORT:
        return work()
    loop = asyncio.get_running_loop()
    return await state.tokenizing.run(admission, lambda thread: loop.run_in_executor(thread, work))


def _check_length(state: ServerState, characters: int, param: str) -> None:
    """Tokenizing what the model can never take would cost seconds and hundreds of megabytes."""
    each, tokens = state.tokenizer.characters_per_token, state.client.ready.max_model_len
    if each is not None and characters > each * tokens:
        raise ApiError(
            400,
            f"this model takes at most {tokens} tokens, which have {each * tokens} characters at most; {param} has "
            f"{characters}: shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _encoded(state: ServerState, text: str | ChatText, add_special_tokens: bool, param: str) -> list[int]:
    try:
        return state.tokenizer.encode(text, add_special_tokens)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
