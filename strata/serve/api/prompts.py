"""Prompts as token ids: templates rendered in their process, long texts tokenized off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from strata.serve.http.errors import ApiError
from strata.serve.state import ServerState

# Tokenizing this many characters takes a millisecond or two; to hand them to a thread and back takes a tenth of one.
_SHORT = 4000


async def chat_text(
    state: ServerState,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """What the model's chat template makes of the messages. Raises ApiError (400) if it refuses them.

    variables: for the template, besides.
    """
    try:
        asked = state.tokenizer.rendering(messages, add_generation_prompt, continue_final_message, tools, variables)
        return await state.templates.render(asked)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages", code="chat_template_failed") from None


async def encode(state: ServerState, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
    """The token ids of a text. Raises ApiError (400) for a text that has none."""
    try:
        if len(text) <= _SHORT:
            return state.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(state.tokenizer.encode, text, add_special_tokens)
    except ValueError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
