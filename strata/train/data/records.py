"""Records as people have them, with the fields of TRL or of ShareGPT: which kind of data each is, and its documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strata.text.messages import Message
from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Document, encode_chat, encode_completion, encode_preference, encode_text

# The fields that tell a kind of data, in the order in which they are looked for.
SHAPES = {
    ("text",): "text",
    ("messages",): "chat",
    ("chosen", "rejected"): "preference",
    ("prompt", "completion"): "chat",
    ("conversations",): "chat",
}
# What ShareGPT calls a role, {"from": "human", "value": ...}.
_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant", "tool")}

# With which a conversation begins, and no reply does.
_OPENING = ("system", "developer", "user")


def kind_of(record: Mapping[str, Any]) -> str:
    """Which kind of data a record is of, by its fields. Raises ValueError if it is of none."""
    return SHAPES[_shape(record, tuple(SHAPES))]


def encode_record(tokenizer: Tokenizer, kind: str, record: Mapping[str, Any]) -> list[Document]:
    """The documents of a record: one, of a chat perhaps several (see `encode_chat`), of a preference chosen, rejected.

    Raises ValueError that names the field, if the record is not of that kind or cannot be learned from.
    """
    shape = _shape(record, tuple(shape for shape, one in SHAPES.items() if one == kind))
    if kind == "text":
        return [encode_text(tokenizer, _text(record, "text"))]
    tools = _tools(record)
    if kind == "preference":
        return list(encode_preference(tokenizer, *_preference(record), tools=tools))
    if shape == ("prompt", "completion"):
        return _completion(tokenizer, record, tools)
    (field,) = shape
    return encode_chat(tokenizer, [*_system(record, field), *_messages(record[field], field)], tools=tools)


def _shape(record: Mapping[str, Any], accepted: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    for shape in accepted:
        if all(field in record for field in shape):
            return shape
    shown = "; ".join(", ".join(shape) for shape in accepted)
    raise ValueError(f"the record has the fields {', '.join(record) or 'none'}; accepted are: {shown}")


def _completion(tokenizer: Tokenizer, record: Mapping[str, Any], tools: list[Any] | None) -> list[Document]:
    if "label" in record:
        raise ValueError("a completion with a 'label' is no example to follow: give chosen and rejected, or no label")
    if isinstance(record["prompt"], str) and isinstance(record["completion"], str):
        return [encode_completion(tokenizer, record["prompt"], record["completion"])]
    prompt, completion = (_messages(record[field], field) for field in ("prompt", "completion"))
    return encode_chat(tokenizer, [*prompt, *completion], first=len(prompt), tools=tools)


def _preference(record: Mapping[str, Any]) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt, chosen and rejected. A text is one message, of the user or of the assistant. Where chosen and rejected
    are whole conversations, with or without a prompt beside them, the prompt is what they have in common.
    """
    chosen, rejected = (_messages(record[field], field, text_is="assistant") for field in ("chosen", "rejected"))
    if all(reply and reply[0]["role"] in _OPENING for reply in (chosen, rejected)):
        same = [one == other for one, other in zip(chosen, rejected, strict=False)]
        cut = [*same, False].index(False)
        if any(reply[cut:] and reply[cut]["role"] in _OPENING for reply in (chosen, rejected)):
            raise ValueError(f"'chosen' and 'rejected' must be alike up to a reply, and differ at messages[{cut}]")
        return chosen[:cut], chosen[cut:], rejected[cut:]
    if record.get("prompt") is None:
        raise ValueError("the record needs a 'prompt', or conversations that begin alike as 'chosen' and 'rejected'")
    return _messages(record["prompt"], "prompt", text_is="user"), chosen, rejected


def _text(record: Mapping[str, Any], field: str) -> str:
    if not isinstance(record[field], str):
        raise ValueError(f"{field!r} must be a text, got {record[field]!r:.60}")
    text: str = record[field]
    return text


def _messages(value: Any, field: str, text_is: str | None = None) -> list[Message]:
    """text_is: the role of a text that stands for one message, where it may."""
    if text_is is not None and isinstance(value, str):
        return [{"role": text_is, "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"{field!r} must be a list of messages, got {value!r:.60}")
    return [_message(one, f"{field}[{at}]") for at, one in enumerate(value)]


def _message(value: Any, place: str) -> Message:
    if isinstance(value, Mapping) and "role" in value:
        return value
    if not isinstance(value, Mapping) or not value.keys() >= {"from", "value"}:
        raise ValueError(f"{place} must have 'role' and 'content', or 'from' and 'value', got {value!r:.60}")
    if not isinstance(value["from"], str) or value["from"] not in _ROLES:
        raise ValueError(f"{place}: from = {value['from']!r} is unknown; accepted are {', '.join(_ROLES)}")
    rest = {key: one for key, one in value.items() if key not in ("from", "value")}
    return {"role": _ROLES[value["from"]], "content": value["value"]} | rest


def _system(record: Mapping[str, Any], field: str) -> list[Message]:
    """The system message that ShareGPT may have beside the conversation."""
    if field != "conversations" or not record.get("system"):
        return []
    return [{"role": "system", "content": _text(record, "system")}]


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    """JSON schemas of functions, as a list or as its text."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"'tools' is not JSON: {error}") from None
        except RecursionError:
            raise ValueError("'tools' is not JSON: nested too deep") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"'tools' must be a list of functions, got {tools!r:.60}")
    return tools
