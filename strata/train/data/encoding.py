"""Text, chats and preferences as token ids, with those marked that are to be learned."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.text.messages import Message, messages_for_template, says_nothing
from strata.text.tokenizer import Tokenizer

# Characters that are encoded at once, since the library takes some 200 bytes for each; and among how many before that
# a cut is looked for.
_AT_ONCE = 2**18
_WINDOW = 2**16
# Before one space between two words, or after a newline and before a word. Pre-tokenizers group a run of blanks, and
# some join newlines to the punctuation before them, so no cut lies inside a run or before a newline.
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?:(?<=\S\n)|(?<=\S\r\n))(?=[^\W\d_])")


@dataclass(frozen=True)
class Document:
    """A sequence that the model reads by itself.

    tokens: [tokens] ids, uint16 or uint32. loss_mask: [tokens] bool, whether the loss counts the prediction of this
    token; never true for the first.
    """

    tokens: NDArray[Any]
    loss_mask: NDArray[np.bool_]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(self.tokens)])


@dataclass(frozen=True)
class Encoded:
    """Documents one after another.

    tokens: [tokens] ids, uint16, int32 or uint32. loss_mask: [tokens] bool, as of a `Document`. offsets: [documents +
    1] int64, where each document begins.
    """

    tokens: NDArray[Any]
    loss_mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @staticmethod
    def of(parts: Sequence[Document | Encoded]) -> Encoded:
        """The documents of all parts."""
        tokens = np.concatenate([np.zeros(0, np.uint16), *(one.tokens for one in parts)])
        loss_mask = np.concatenate([np.zeros(0, np.bool_), *(one.loss_mask for one in parts)])
        ends = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(one.lengths for one in parts)]))
        return Encoded(tokens, loss_mask, ends)


def encode_text(tokenizer: Tokenizer, text: str) -> Document:
    """A text as the tokenizer encodes it, closed with its end of sequence; the loss counts all of it but the first
    token."""
    ids = text_ids(tokenizer, text)
    loss_mask = np.ones(len(ids), np.bool_)
    loss_mask[:1] = False
    return Document(ids, loss_mask)


def text_ids(tokenizer: Tokenizer, text: str, *, is_first: bool = True, is_last: bool = True) -> NDArray[np.uint32]:
    """The ids of a part of a text, [tokens]: what the tokenizer puts before and after a text only where one does.

    is_first, is_last: whether it is the first and the last part. A long part is encoded in chunks, which bounds memory;
    see `last_cut` for which tokenizers that changes nothing.
    """
    if is_first and is_last and len(text) <= _AT_ONCE:
        ids = np.array(tokenizer.encode(text), np.uint32)
    else:
        before, after = _added(tokenizer)
        encoded = (tokenizer.encode(chunk, add_special_tokens=False) for chunk in _chunks(text))
        parts = [np.array(part, np.uint32) for part in (before * is_first, *encoded, after * is_last)]
        ids = np.concatenate(parts)
    if is_last and tokenizer.eos_ids and ids[-1:].tolist() != [tokenizer.eos_ids[0]]:
        ids = np.append(ids, np.uint32(tokenizer.eos_ids[0]))
    return ids


def last_cut(text: str) -> int:
    """The last index at which `text` can be cut and its parts have the ids of the whole; its length if there is none.

    That holds for byte-level BPE with the usual pre-tokenizers, and for others that put nothing before each text.
    """
    places = [found.start() for found in _CUT.finditer(text, max(0, len(text) - _WINDOW))]
    return places[-1] if places else len(text)


def encode_completion(tokenizer: Tokenizer, prompt: str, completion: str) -> list[Document]:
    """A text that continues another, as the tokenizer encodes both together, without a chat template; the completion
    and what closes it count in the loss. None if it is empty.
    """
    if not completion:
        return []
    before, ids = text_ids(tokenizer, prompt, is_last=False), text_ids(tokenizer, prompt + completion)
    return [_document(ids.tolist(), [(_common(before.tolist(), ids.tolist()), len(ids))])]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    learned: Sequence[int] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    empty_turns: bool = False,
) -> list[Document]:
    """The documents of one conversation; the assistant's turns, with what ends each, count in the loss.

    A turn begins where the prompt ends that the template writes for it (`add_generation_prompt`), so training sees what
    generation will. A template that writes earlier turns otherwise once more follow (dropping their reasoning) cannot
    show all turns in one text as generation had them: such a conversation becomes one document for each assistant turn.
    learned: which messages count, in order, where not all of the assistant's do. tools: JSON schemas of the functions
    that the model may call. variables: for the template, besides. empty_turns: learn those that say nothing too; they
    would teach a model to end at once, and are read as all else otherwise; without another turn there is no document.
    Raises ValueError for messages that the template refuses, and for a conversation without the assistant.
    """
    messages = messages_for_template(messages)

    def encoded(messages: Sequence[Message], *, prompt: bool) -> list[int]:
        return tokenizer.encode_chat(messages, add_generation_prompt=prompt, tools=tools, variables=variables)

    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if learned is not None:
        turns = list(learned)
    if not turns:
        raise ValueError("the messages have no assistant turn, so there is nothing to learn")
    if not empty_turns:
        turns = [turn for turn in turns if not says_nothing(messages[turn])]
    if not turns:
        return []
    if turns[0] == 0:
        raise ValueError("the first message is the assistant's; a conversation begins with another role")
    ids = encoded(messages, prompt=False)
    spans, parts = [], []
    for turn in turns:
        prompt = encoded(messages[:turn], prompt=True)
        parts.append(encoded(messages[: turn + 1], prompt=False))
        spans.append(_reply_span(prompt, parts[-1], tokenizer.eos_ids, turn))
    if all(ids[: len(part)] == part for part in parts):
        return [_document(ids, spans)]
    return [_document(part, [span]) for part, span in zip(parts, spans, strict=True)]


def _reply_span(prompt: list[int], upto: list[int], ends: tuple[int, ...], turn: int) -> tuple[int, int]:
    """From the end of the prompt to the token that ends the turn (the template's blanks after it do not count)."""
    # The last token of the prompt may have grown together with the reply's first: it then belongs to the reply.
    start = _common(prompt, upto)
    if start < len(prompt) - 1:
        raise ValueError(f"the chat template does not write messages[{turn}] after its own generation prompt")
    end = next((at + 1 for at in range(start, len(upto)) if upto[at] in ends), len(upto))
    if end == start:
        raise ValueError(f"messages[{turn}] is empty, so there is nothing to learn")
    return start, end


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal ids two texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _chunks(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _AT_ONCE:
        end = start + last_cut(text[start : start + _AT_ONCE])
        yield text[start:end]
        start = end
    yield text[start:]


def _added(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    bare, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    start = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def _document(ids: list[int], spans: Sequence[tuple[int, int]]) -> Document:
    loss_mask = np.zeros(len(ids), np.bool_)
    for start, end in spans:
        loss_mask[start:end] = True
    loss_mask[:1] = False
    return Document(np.array(ids, np.uint32), loss_mask)
