"""Records with the fields of TRL, ShareGPT or Alpaca: which kind of data each is, and its documents."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Document, encode_chat, encode_completion, encode_text
from strata.train.data.turns import Turn, check_record, read_turns, unmarked

# Rows of Alpaca, {"instruction", "input", "output"}, with the mapping of LLaMA-Factory and ms-swift.
ALPACA = ("instruction", "output")
# The fields that tell a kind of data, in the order in which they are looked for.
SHAPES = {
    ALPACA: "chat",
    ("messages",): "chat",
    ("chosen", "rejected"): "preference",
    ("prompt", "completion"): "chat",
    ("conversations",): "chat",
    ("text",): "text",  # last: some have the whole of another shape as "text", too
}

# With which a conversation begins, and no reply does.
_OPENING = ("system", "developer", "user")


def kind_of(record: Mapping[str, Any]) -> str:
    """Which kind of data a record is of, by its fields. Raises ValueError if it is of none."""
    return SHAPES[_shape(record, tuple(SHAPES))]


def encode_record(tokenizer: Tokenizer, kind: str, record: Mapping[str, Any]) -> list[Document]:
    """The documents of a record: one, of a chat perhaps several (see `encode_chat`); of a preference chosen, rejected;
    none where there is nothing to learn, since it is empty or all of its turns are marked so.

    Raises ValueError that names the field, if the record is not of that kind or cannot be learned from.
    """
    shape = _shape(record, tuple(shape for shape, one in SHAPES.items() if one == kind))
    check_record(record, kind)
    if kind == "text":
        text = _text_of(record, "text")
        return [encode_text(tokenizer, text)] if text else []
    if kind == "preference":
        prompt, *replies = _preference(tokenizer, record)
        return [
            # An empty reply counts: it may be the worse of the two.
            _reply(_chat(tokenizer, record, prompt, reply, empty_turns=True), field)
            for field, reply in zip(("chosen", "rejected"), replies, strict=True)
        ]
    if shape == ("prompt", "completion"):
        return _completion(tokenizer, record)
    if shape == ALPACA:  # responses of `history` are learned like the output
        turns = [*_alpaca_prompt(record), unmarked("assistant", _text_of(record, "output"))]
    else:
        turns = read_turns(tokenizer, record[shape[0]], shape[0])
    return _chat(tokenizer, record, (), turns)


def _shape(record: Mapping[str, Any], accepted: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    for shape in accepted:
        if all(record.get(field) is not None for field in shape):
            return shape
    shown = "; ".join(", ".join(shape) for shape in accepted)
    given = ", ".join(field for field, value in record.items() if value is not None) or "none"
    raise ValueError(f"the record has the fields {given}; accepted are: {shown}")


def _chat(
    tokenizer: Tokenizer,
    record: Mapping[str, Any],
    context: Sequence[Turn],
    replies: Sequence[Turn],
    empty_turns: bool = False,
) -> list[Document]:
    """context: turns of which none is learned. empty_turns: see `encode_chat`. Without a turn that is learned, nothing,
    if a mark says so."""
    context = [*_system(record, [*context, *replies]), *context]
    turns = [*context, *replies]
    learned = [at for at, turn in enumerate(turns) if at >= len(context) and turn.is_learned]
    if not learned and any(turn.role == "assistant" for turn in replies):
        return []
    messages = [turn.message for turn in turns]
    variables = record.get("chat_template_kwargs") or None
    return encode_chat(tokenizer, messages, learned, tools_of(record), variables, empty_turns)


def _completion(tokenizer: Tokenizer, record: Mapping[str, Any]) -> list[Document]:
    if isinstance(record["prompt"], str) and isinstance(record["completion"], str):
        for field in ("system", "tools"):
            if record.get(field):
                raise ValueError(
                    f"{field!r} is for a chat template, and texts are learned without one: give prompt and completion "
                    f"as messages, or no {field!r}"
                )
        return encode_completion(tokenizer, record["prompt"], record["completion"])
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
        same = [one.message == other.message for one, other in zip(chosen, rejected, strict=False)]
        cut = [*same, False].index(False)
        if cut == len(chosen) == len(rejected) and chosen[-1].role == "assistant":
            cut -= 1  # alike throughout, as two texts may be: the last turn is the reply
        if any(reply[cut:] and reply[cut].role in _OPENING for reply in (chosen, rejected)):
            raise ValueError(f"'chosen' and 'rejected' must be alike up to a reply, and differ at messages[{cut}]")
        return chosen[:cut], chosen[cut:], rejected[cut:]
    if record.get("prompt") is None and record.get("instruction") is not None:
        return _alpaca_prompt(record), chosen, rejected
    for field in ("prompt", "conversations"):
        if record.get(field) is not None:
            return read_turns(tokenizer, record[field], field, "user"), chosen, rejected
    raise ValueError("the record needs a 'prompt', or conversations that begin alike as 'chosen' and 'rejected'")


def _system(record: Mapping[str, Any], turns: Sequence[Turn]) -> list[Turn]:
    """The system message that may stand beside a conversation without one."""
    if not record.get("system") or (turns and turns[0].role in ("system", "developer")):
        return []
    return [unmarked("system", _text_of(record, "system"))]


def tools_of(record: Mapping[str, Any]) -> list[Any] | None:
    """JSON schemas of functions, as a list or as its text. Raises ValueError for another text."""
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
    asked = [_text_of(record, field) for field in ("instruction", "input") if record.get(field) not in (None, "")]
    if not asked:
        raise ValueError("'instruction' and 'input' are empty, so nothing is asked")
    return [*turns, unmarked("user", "\n".join(asked))]


def _text_of(record: Mapping[str, Any], field: str) -> str:
    """A field that must be a text."""
    if not isinstance(record[field], str):
        raise ValueError(f"{field!r} must be a text, got {record[field]!r:.60}")
    text: str = record[field]
    return text
