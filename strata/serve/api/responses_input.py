"""The input of a /v1/responses request as the messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.serve.http.errors import ApiError
from strata.serve.replies.reply_parser import Reply
from strata.serve.schema.messages import (
    AssistantMessage,
    CalledFunction,
    Message,
    MessageToolCall,
    SystemMessage,
    ToolMessage,
    UserMessage,
    for_template,
)
from strata.serve.schema.responses import (
    Content,
    FunctionCallItem,
    FunctionCallOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
)


def input_messages(given: str | Sequence[Item], before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of an input, as chat templates take them.

    What the model wrote in one go, as reasoning, a message and calls, is one message of the assistant.
    before: the conversation that it goes on from. Raises ApiError (400) for the output of a call that nobody made.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    calls = {call["id"] for message in before for call in message.get("tool_calls", ())}
    messages: list[Message] = []
    for number, item in enumerate(given):
        if isinstance(item, FunctionCallOutputItem):
            if item.call_id not in calls:
                raise ApiError(
                    400,
                    f"input[{number}].call_id: no function call before it has the call_id {item.call_id!r:.80}",
                    param=f"input[{number}].call_id",
                )
            messages.append(ToolMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(_message(item))
        else:
            if isinstance(item, FunctionCallItem):
                calls.add(item.call_id)
            _add_to_assistant(messages, item)
    return [for_template(message) for message in messages]


def assistant_message(reply: Reply) -> dict[str, Any]:
    """What the model has written, as the message that later requests go on from."""
    calls = [
        MessageToolCall(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))
        for call in reply.tool_calls
    ]
    message = AssistantMessage(role="assistant", content=reply.content)
    message.reasoning_content = reply.reasoning or None
    message.tool_calls = calls or None
    return for_template(message)


def _message(item: MessageItem) -> Message:
    if item.role == "user":
        return UserMessage(role="user", content=_text(item.content))
    return SystemMessage(role="system", content=_text(item.content))


def _add_to_assistant(messages: list[Message], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    last = messages[-1] if messages else None
    if not isinstance(last, AssistantMessage) or not _follows(last, item):
        last = AssistantMessage(role="assistant")
        messages.append(last)
    if isinstance(item, FunctionCallItem):
        function = CalledFunction(name=item.name, arguments=item.arguments)
        call = MessageToolCall(id=item.call_id, type="function", function=function)
        last.tool_calls = [*(last.tool_calls or ()), call]
    elif isinstance(item, ReasoningItem):
        last.reasoning_content = "\n".join(part.text for part in item.content or item.summary or ())
    else:
        last.content = _text(item.content)


def _follows(message: AssistantMessage, item: MessageItem | FunctionCallItem | ReasoningItem) -> bool:
    """Whether an item belongs to a message that has these parts already: reasoning, then content, then calls."""
    if isinstance(item, FunctionCallItem):
        return True
    empty = message.content is None and not message.tool_calls
    return empty and (isinstance(item, MessageItem) or message.reasoning_content is None)


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
