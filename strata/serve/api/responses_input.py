"""The input of a /v1/responses request as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.serve.http.errors import ApiError
from strata.serve.replies.reply_parser import Reply
from strata.serve.schema.responses import (
    Content,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)
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
    calls = [_call(call.id, call.name, call.arguments) for call in reply.tool_calls]
    reasoning = reply.reasoning or None
    written = {"role": "assistant", "content": reply.content, "reasoning_content": reasoning, "tool_calls": calls}
    return messages_for_template([written])[0]


def _add_to_assistant(messages: list[dict[str, Any]], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    if not messages or not _follows(messages[-1], item):
        messages.append({"role": "assistant"})
    last = messages[-1]
    if isinstance(item, FunctionCallItem):
        last.setdefault("tool_calls", []).append(_call(item.call_id, item.name, item.arguments))
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


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _content(content: Content) -> Any:
    return content if isinstance(content, str) else [part.model_dump() for part in content]
