"""Records with the fields of TRL, ShareGPT or Alpaca: which kind of data each is, and its documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Document, encode_chat, encode_completion, encode_text
from strata.train.data.turns import Turn, check_record, read_turns, unmarked

ALPACA = ("instruction", "output")  # and perhaps "input", "history": as LLaMA-Factory and ms-swift map them
# The fields that tell a kind of data, in the order in which they are looked for.
SHAPES = {
    ALPACA: "chat",  # before text: some have the whole prompt as "text", too
    ("text",): "text",
    ("messages",): "chat",
    ("chosen", "rejected"): "preference",
    ("prompt", "completion"): "chat",
    ("conversations",): "chat",
}
# With which a conversation begins, and no reply does.
_OPENING = ("system", "developer", "user")


def kind_of(record: Mapping[str, Any]) -> str:
    """Which kind of data a record is of, by its fields. Raises ValueError if it is of none."""
    return SHAPES[_shape(record, tuple(SHAPES))]


def encode_record(tokenizer: Tokenizer, kind: str, record: Mapping[str, Any]) -> list[Document]:
    """The documents of a record: one, of a chat perhaps several (see `encode_chat`) or, where all of its turns are
    marked as not to be learned, none; of a preference chosen, rejected.

    Raises ValueError that names the field, if the record is not of that kind or cannot be learned from.
    """
    shape = _shape(record, tuple(shape for shape, one in SHAPES.items() if one == kind))
    check_record(record, kind)
    if kind == "text":
        return [encode_text(tokenizer, text_of(record, "text"))]
    if kind == "preference":
        prompt, *replies = _preference(tokenizer, record)
        return [
            # An empty reply counts: it may be the worse of the two.
            _reply(_chat(tokenizer, record, prompt, reply, empty_turns=True), field)
            for field, reply in zip(("chosen", "rejected"), replies, strict=True)
        ]
    if shape == ("prompt", "completion"):
        return _completion(tokenizer, record)
    turns = _alpaca_turns(record) if shape == ALPACA else read_turns(tokenizer, record[shape[0]], shape[0])
    return _chat(tokenizer, record, _system(record, turns), turns)


def _shape(record: Mapping[str, Any], accepted: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    for shape in accepted:
        if all(field in record for field in shape):
            return shape
    shown = "; ".join(", ".join(shape) for shape in accepted)
    raise ValueError(f"the record has the fields {', '.join(record) or 'none'}; accepted are: {shown}")


def _chat(
    tokenizer: Tokenizer,
    record: Mapping[str, Any],
    context: Sequence[Turn],
    replies: Sequence[Turn],
    empty_turns: bool = False,
) -> list[Document]:
    """context: turns of which none is learned. empty_turns: see `encode_chat`. Without a turn that is learned, nothing,
    if a mark says so."""
    turns = [*context, *replies]
    learned = [at for at, turn in enumerate(turns) if at >= len(context) and turn.is_learned]
    if not learned and any(turn.role == "assistant" for turn in replies):
        return []
    return encode_chat(tokenizer, [turn.message for turn in turns], learned, _tools(record), empty_turns)


def _completion(tokenizer: Tokenizer, record: Mapping[str, Any]) -> list[Document]:
    if isinstance(record["prompt"], str) and isinstance(record["completion"], str):
        return [encode_completion(tokenizer, record["prompt"], record["completion"])]
    prompt, completion = (read_turns(tokenizer, record[field], field) for field in ("prompt", "completion"))
    return _chat(tokenizer, record, prompt, completion)


def _reply(documents: Sequence[Document], field: str) -> Document:
    """The one document of a reply of a preference."""
    if not documents:
        raise ValueError(f"{field!r} has no turn that is learned: marks say so")
    if len(documents) > 1:
        raise ValueError("the chat template cannot show all turns of a reply in one text: give one assistant turn")
    return documents[0]


def _preference(tokenizer: Tokenizer, record: Mapping[str, Any]) -> tuple[list[Turn], list[Turn], list[Turn]]:
    """Prompt, chosen and rejected. A text is one message, of the user or of the assistant. Where chosen and rejected
    are whole conversations, with or without a prompt beside them, the prompt is what they have in common.
    """
    chosen, rejected = (read_turns(tokenizer, record[field], field, "assistant") for field in ("chosen", "rejected"))
    if all(reply and reply[0].role in _OPENING for reply in (chosen, rejected)):
        same = [one == other for one, other in zip(chosen, rejected, strict=False)]
        cut = [*same, False].index(False)
        if any(reply[cut:] and reply[cut].role in _OPENING for reply in (chosen, rejected)):
            raise ValueError(f"'chosen' and 'rejected' must be alike up to a reply, and differ at messages[{cut}]")
        return chosen[:cut], chosen[cut:], rejected[cut:]
    if record.get("prompt") is None and "instruction" in record:
        return [*_system(record, ()), *_alpaca_prompt(record)], chosen, rejected
    if record.get("prompt") is None:
        raise ValueError("the record needs a 'prompt', or conversations that begin alike as 'chosen' and 'rejected'")
    return read_turns(tokenizer, record["prompt"], "prompt", "user"), chosen, rejected


def _system(record: Mapping[str, Any], turns: Sequence[Turn]) -> list[Turn]:
    """The system message that may stand beside a conversation without one."""
    if not record.get("system") or (turns and turns[0].role in ("system", "developer")):
        return []
    return [unmarked("system", text_of(record, "system"))]


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


def _alpaca_prompt(record: Mapping[str, Any]) -> list[Turn]:
    """The turns before the output: those of `history`, then the user's, instruction and input in a line each.

    Raises ValueError that names the field.
    """
    turns = []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise ValueError(f"'history' must be a list of prompts with their responses, got {history!r:.60}")
    for at, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"history[{at}] must be a prompt and its response, two texts, got {pair!r:.60}")
        turns += [unmarked("user", pair[0]), unmarked("assistant", pair[1])]
    asked = [text_of(record, field) for field in ("instruction", "input") if record.get(field)]
    if not asked:
        raise ValueError("'instruction' and 'input' are empty, so nothing is asked")
    return [*turns, unmarked("user", "\n".join(asked))]


def _alpaca_turns(record: Mapping[str, Any]) -> list[Turn]:
    """The whole chat; responses of `history` are learned like the output. Raises ValueError that names the field."""
    output = text_of(record, "output")
    if not output:
        raise ValueError("'output' is empty, so there is nothing to learn")
    return [*_alpaca_prompt(record), unmarked("assistant", output)]


def text_of(record: Mapping[str, Any], field: str) -> str:
    """A field that must be a text."""
    if not isinstance(record[field], str):
        raise ValueError(f"{field!r} must be a text, got {record[field]!r:.60}")
    text: str = record[field]
    return text
