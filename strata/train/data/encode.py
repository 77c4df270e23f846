"""From documents to token ids, and which of those the model is trained to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers

from strata.train.data.encoding import Encoded
from strata.train.tasks.example import BOUNDARY, Example
from strata.train.tasks.mixture import ExerciseDocument
from strata.train.tasks.tool import listing
from strata.train.tasks.vocabulary import ASSISTANT, BEGIN, END, SYSTEM, TOOL, USER


class Encoder:
    """Writes documents as the chat template does; the loss counts what the model says and its `<|end|>`, nothing
    else."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._id = {token: _known(tokenizer, token) for token in (BEGIN, END, SYSTEM, USER, ASSISTANT, TOOL)}

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """With the tokenizer of a folder. Raises ValueError if that one lacks a special token of the exercises."""
        return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))

    def prompt(self, example: Example) -> list[int]:
        """The question as a chat, after the tools that are offered, up to where the model's turn begins."""
        return self._until(replace(example, call=None))

    def prompt_after_call(self, example: Example) -> list[int]:
        """The same with the example's call and its result, up to where the model's next turn begins."""
        return self._until(example)

    def _until(self, example: Example) -> list[int]:
        """All before the reply."""
        parts = [part for part, _ in self._parts(ExerciseDocument((example,)))][:-2]
        encoded = [
            [part] if isinstance(part, int) else self._tokenizer.encode(part, add_special_tokens=False).ids
            for part in parts
        ]
        return list(chain.from_iterable(encoded))

    def encode(self, documents: Sequence[ExerciseDocument]) -> Encoded:
        """All documents, encoded in one call of the tokenizer."""
        pieces: list[str | int] = []
        loss_mask: list[bool] = []
        starts = [0]
        for document in documents:
            for text, counts in self._parts(document):
                split: list[str | int] = [text] if isinstance(text, int) else [*text.split(BOUNDARY)]
                pieces += split
                loss_mask += [counts] * len(split)
            starts.append(len(pieces))
        texts = [piece for piece in pieces if isinstance(piece, str)]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        ids = [[piece] if isinstance(piece, int) else next(encoded).ids for piece in pieces]
        lengths = np.array([len(one) for one in ids], dtype=np.int64)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.fromiter(chain.from_iterable(ids), dtype=np.uint32, count=int(ends[-1]))
        return Encoded(tokens, np.repeat(np.array(loss_mask, dtype=np.bool_), lengths), ends[np.array(starts)])

    def _parts(self, document: ExerciseDocument) -> list[tuple[str | int, bool]]:
        """Texts and special ids in order, each with whether the loss counts it."""
        parts: list[tuple[str | int, bool]] = [(self._id[BEGIN], False)]
        if document.plain:
            example = document.examples[0]
            return [*parts, (example.question, False), ("\n", True), (example.reply, True), (self._id[END], True)]
        for text in (listing(document.tools) if document.tools else None, document.system):
            if text is not None:
                parts += self._turn(SYSTEM, text)
        for example in document.examples:
            parts += self._turn(USER, example.question)
            if example.call is not None:
                parts += [*self._turn(ASSISTANT, example.call.text), *self._turn(TOOL, example.call.result)]
            parts += self._turn(ASSISTANT, example.reply)
        return parts

    def _turn(self, role: str, text: str) -> list[tuple[str | int, bool]]:
        """The loss counts what the model says and the end that it sets."""
        loss_mask = role == ASSISTANT
        return [(self._id[role], False), (text, loss_mask), (self._id[END], loss_mask)]


def _known(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    if (id := tokenizer.token_to_id(token)) is None:
        raise ValueError(f"the tokenizer has no token {token}; make it with strata.train.tasks.vocabulary")
    return id
