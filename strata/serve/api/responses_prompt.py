"""The prompt of a response: its conversation through the chat template, shortened where that was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata.serve.api.prompts import Prompt, chat_text, encode
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest
from strata.serve.state import ServerState


async def response_prompt(
    state: ServerState,
    admission: AdmittedRequest,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    variables: Mapping[str, Any],
    *,
    shorten: bool,
    output_tokens: int,
) -> Prompt:
    """The prompt that continues the messages.

    variables: for the chat template, besides messages and tools.
    shorten: if it and `output_tokens` do not fit the model, the oldest messages go, up to a later one of the user;
        system messages at the start stay. What does not fit even so is returned as it is.
    Raises ApiError (400) for messages that the template refuses.
    """
    most = state.client.ready.max_model_len - output_tokens

    async def render(tried: Sequence[dict[str, Any]]) -> Prompt:
        try:
            text = await chat_text(state, admission, tried, tools=tools, variables=variables)
        except ApiError as error:
            error.param = "input"  # here the messages are called so
            raise
        return Prompt(text.text, await encode(state, admission, text, add_special_tokens=False, param="input"))

    async def fitting(tried: Sequence[dict[str, Any]]) -> Prompt | None:
        try:
            prompt = await render(tried)
        except ApiError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        return prompt if len(prompt.ids) <= most else None

    if not shorten:
        return await render(messages)
    if (whole := await fitting(messages)) is not None:
        return whole
    head = next((place for place, message in enumerate(messages) if message["role"] != "system"), 0)
    starts = [place for place, message in enumerate(messages) if message["role"] == "user" and place > head]
    # Each try renders the template, so the first start that fits is found by halving.
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        if await fitting([*messages[:head], *messages[starts[middle] :]]) is not None:
            high = middle
        else:
            low = middle + 1
    start = starts[min(low, len(starts) - 1)] if starts else head
    return await render([*messages[:head], *messages[start:]])
