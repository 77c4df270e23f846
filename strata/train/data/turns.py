"""The turns of conversations with the fields of OpenAI or of ShareGPT, and the marks that keep some from the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from strata.text.messages import Message
from strata.text.tokenizer import Tokenizer

# What ShareGPT calls a role, {"from": "human", "value": ...}.
_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant", "tool")}
# Fields of a message that are known whatever the chat template; reasoning goes by three names.
_FIELDS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "refusal",
    "reasoning_content",
    "reasoning",
    "thinking",
)
# Marks of a turn, 0 or false for context, and whose format has each.
_MARKS = {
    "weight": "OpenAI",
    "train": "axolotl",
    "training": "axolotl",
    "loss": "ms-swift",
    "loss_scale": "ms-swift",
}
# axolotl's mark of parts of a turn, by their characters.
_PARTS = "train_detail"
# Marks of a whole record as an example not to follow, of TRL and ms-swift, and of LLaMA-Factory.
_LABELS = ("label", "kto_tag")
# Fields of a record that say more of a chat than is read, and what says it here.
_ELSEWHERE = {
    "functions": "that is the older form, use tools",
    "rejected_response": "give preferences as chosen and rejected",
    "rejected_messages": "give preferences as chosen and rejected",
}


class Turn(NamedTuple):
    """A message as the chat template takes it. is_learned: whether the loss may count it, so it is the assistant's."""

    message: Message
    is_learned: bool

    @property
    def role(self) -> Any:
        return self.message["role"]


def read_turns(tokenizer: Tokenizer, value: Any, field: str, text_is: str | None = None) -> list[Turn]:
    """The turns in a field of a record. text_is: the role of a text that stands for one message, where that, or one
    message without a list, may.

    Raises ValueError, naming the message, for what is none, and for keys that mean nothing here.
    """
    if text_is is not None and isinstance(value, str):
        return [unmarked(text_is, value)]
    if text_is is not None and isinstance(value, Mapping):
        return [_turn(tokenizer, value, field)]
    if not isinstance(value, list):
        raise ValueError(f"{field!r} must be a list of messages, got {value!r:.60}")
    return [_turn(tokenizer, one, f"{field}[{at}]") for at, one in enumerate(value)]


def unmarked(role: str, text: str) -> Turn:
    """One without marks."""
    return Turn({"role": role, "content": text}, role == "assistant")


def check_record(record: Mapping[str, Any], kind: str) -> None:
    """Raises ValueError for a record that is marked as a whole, unless as one to learn, and for fields that say more of
    a chat than is read."""
    for mark in (*_MARKS, "loss_mask"):
        if record.get(mark) is not None and not _is_one_of(record[mark], (1,)):
            raise ValueError(
                f"{mark} = {record[mark]!r:.60} marks the record as a whole, and only turns are marked, in their "
                "messages: remove the mark, or the record"
            )
    for field, instead in _ELSEWHERE.items():
        if kind == "chat" and record.get(field):
            raise ValueError(f"{field!r} is not supported: {instead}")
    for label in _LABELS:
        if kind == "chat" and _is_one_of(record.get(label), (0, 1)):
            raise ValueError(
                f"a chat with a {label!r} is no example to follow: give chosen and rejected, or no {label}"
            )


def _turn(tokenizer: Tokenizer, value: Any, place: str) -> Turn:
    message = _message(value, place)
    role, mark = message["role"], _mark(message, place)
    if mark and role != "assistant":
        shown = ", ".join(f"{key} = {message[key]!r}" for key in _MARKS if message.get(key) is not None)
        raise ValueError(f"{place}: {shown}, but its role is {role!r}, and only turns of the assistant are learned")
    more = [key for key, one in message.items() if key not in (*_FIELDS, *_MARKS) and one is not None]
    for key in more:
        if not tokenizer.template_names(key):
            raise ValueError(
                f"{place}: the key {key!r} is unknown; accepted are {', '.join(_FIELDS)}, what the chat template "
                f"names, and the marks {_shown_marks()}"
            )
    kept = {key: one for key, one in message.items() if key in _FIELDS or key in more}
    return Turn(kept, role == "assistant" and mark is not False)


def _message(value: Any, place: str) -> Message:
    if isinstance(value, Mapping) and "role" in value:
        return value
    if not isinstance(value, Mapping) or not value.keys() >= {"from", "value"}:
        raise ValueError(f"{place} must have 'role' and 'content', or 'from' and 'value', got {value!r:.60}")
    if not isinstance(value["from"], str) or value["from"] not in _ROLES:
        raise ValueError(f"{place}: from = {value['from']!r} is unknown; accepted are {', '.join(_ROLES)}")
    rest = {key: one for key, one in value.items() if key not in ("from", "value")}
    return {"role": _ROLES[value["from"]], "content": value["value"]} | rest


def _mark(message: Message, place: str) -> bool | None:
    """Whether a turn is marked as one to be learned; None without a mark."""
    given = {mark: message[mark] for mark in _MARKS if message.get(mark) is not None}
    for mark, value in given.items():
        if not _is_one_of(value, (0, 1)):
            raise ValueError(f"{place}: {mark} = {value!r:.60} is not supported; accepted are 0 and 1, false and true")
    if len({bool(value) for value in given.values()}) > 1:
        shown = " and ".join(f"{mark} = {value!r}" for mark, value in given.items())
        raise ValueError(f"{place}: {shown} disagree")
    if message.get(_PARTS) is not None:
        raise ValueError(f"{place}: {_PARTS!r} marks parts of a turn; only whole turns are marked, by {_shown_marks()}")
    for field in ("content", "reasoning_content"):
        parts = message.get(field)
        for part in parts if isinstance(parts, list) else ():
            for mark in _MARKS:
                if isinstance(part, Mapping) and part.get(mark) is not None:
                    raise ValueError(
                        f"{place}: {mark!r} marks a part of the {field}; only whole turns are marked, beside their role"
                    )
    return next((bool(value) for value in given.values()), None)


def _is_one_of(value: Any, accepted: tuple[int, ...]) -> bool:
    """Also for false and true, and for 0.0 and 1.0."""
    return isinstance(value, int | float) and value in accepted


def _shown_marks() -> str:
    formats = dict.fromkeys(_MARKS.values())
    return ", ".join(f"{' or '.join(mark for mark in _MARKS if _MARKS[mark] == one)} ({one})" for one in formats)
