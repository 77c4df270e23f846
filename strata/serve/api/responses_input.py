"""The input of a /v1/responses request as the messages of a chat, and its prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strata.serve.api.prompts import Prompt, chat_prompt
from strata.serve.http.errors import ApiError
from strata.serve.http.limits import AdmittedRequest
from strata.serve.replies.reply_parser import Reply, ToolCall
from strata.serve.schema.responses import (
    Content,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
)
from strata.serve.state import ServerState
from strata.text.messages import messages_for_template


def input_messages(given: str | Sequence[Item], before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of an input, as chat templates take them.

    What the model wrote in one go, as reasoning, a message and calls, is one message of the assistant.
    before: the conversation that it goes on from. Raises ApiError (400) for the output of a call that nobody made.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    calls = {call["id"] for message in before for call in message.get("tool_calls", ())}
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        if isinstance(item, FunctionCallOutputItem):
            if item.call_id not in calls:
                raise ApiError(
                    400,
                    f"input[{number}].call_id: no function call before it has the call_id {item.call_id!r:.80}",
                    param=f"input[{number}].call_id",
                )
            messages.append({"role": "tool", "content": _content(item.output), "tool_call_id": item.call_id})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _content(item.content)})
        else:
            if isinstance(item, FunctionCallItem):
                calls.add(item.call_id)
            _add_to_assistant(messages, item)
    return messages_for_template(messages)


def assistant_message(reply: Reply) -> dict[str, Any]:
    """What the model has written, as the message that later requests go on from."""
    calls = [call.as_sent() for call in reply.tool_calls]
    reasoning = reply.reasoning or None
    written = {"role": "assistant", "content": reply.content, "reasoning_content": reasoning, "tool_calls": calls}
    return messages_for_template([written])[0]


async def response_prompt(
    state: ServerState,
    admission: AdmittedRequest,
    body: ResponsesRequest,
    conversation: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    rendered: Callable[[str], None],
) -> Prompt:
    """The prompt that continues the conversation.

    With `truncation: "auto"`, if it and the output do not fit the model, the oldest messages go, up to a later one of
    the user; system messages at the start stay. What does not fit even so is returned as it is.
    Raises ApiError (400) for messages that the template refuses. rendered: see `chat_prompt`.
    """
    most = state.client.ready.max_model_len - (body.max_output_tokens or 1)
    messages = [*([{"role": "system", "content": body.instructions}] if body.instructions else ()), *conversation]

    async def render(tried: Sequence[dict[str, Any]]) -> Prompt:
        variables = body.template_variables
        return await chat_prompt(
            state, admission, tried, param="input", rendered=rendered, tools=tools, variables=variables
        )

    async def fitting(tried: Sequence[dict[str, Any]]) -> Prompt | None:
        try:
            prompt = await render(tried)
        except ApiError as error:
            if error.code == "context_length_exceeded":
                return None
            raise
        return prompt if len(prompt.ids) <= most else None

    if body.truncation != "auto":
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


def _add_to_assistant(messages: list[dict[str, Any]], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    if not messages or not _follows(messages[-1], item):
        messages.append({"role": "assistant"})
    last = messages[-1]
    if isinstance(item, FunctionCallItem):
        last.setdefault("tool_calls", []).append(ToolCall(item.call_id, item.name, item.arguments).as_sent())
    elif isinstance(item, ReasoningItem):
        last["reasoning_content"] = "\n".join(part.text for part in item.content or item.summary or ())
    else:
        last["content"] = _content(item.content)


def _follows(message: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem) -> bool:
    """Whether an item belongs to a message that has these parts already: reasoning, then content, then calls."""
    if message["role"] != "assistant":
        return False
    if isinstance(item, FunctionCallItem):
        return True
    empty = "content" not in message and "tool_calls" not in message
    return empty and (isinstance(item, MessageItem) or "reasoning_content" not in message)


def _content(content: Content) -> Any:
    return content if isinstance(content, str) else [part.model_dump() for part in content]
