"""From documents to token ids, and which of those the model is trained to predict."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import tokenizers

from strata.train.data.encoding import Encoded
from strata.train.tasks.example import BOUNDARY, Example
from strata.train.tasks.mixture import Document
from strata.train.vocabulary import ASSISTANT, BEGIN, END, SYSTEM, USER


class Encoder:
    """Writes documents as the chat template does; replies and the `<|end|>` after them are wanted, nothing else."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._id = {token: _known(tokenizer, token) for token in (BEGIN, END, SYSTEM, USER, ASSISTANT)}

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """With the tokenizer of a folder. Raises ValueError if that one lacks a special token of the exercises."""
        return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))

    def prompt(self, example: Example) -> list[int]:
        """The question as a chat of one message, up to where the reply begins."""
        question = self._tokenizer.encode(example.question, add_special_tokens=False).ids
        return [self._id[BEGIN], self._id[USER], *question, self._id[END], self._id[ASSISTANT]]

    def encode(self, documents: Sequence[Document]) -> Encoded:
        """All documents, encoded in one call of the tokenizer."""
        pieces: list[str | int] = []
        wanted: list[bool] = []
        starts = [0]
        for document in documents:
            for text, counts in self._parts(document):
                split: list[str | int] = [text] if isinstance(text, int) else [*text.split(BOUNDARY)]
                pieces += split
                wanted += [counts] * len(split)
            starts.append(len(pieces))
        texts = [piece for piece in pieces if isinstance(piece, str)]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        ids = [[piece] if isinstance(piece, int) else next(encoded).ids for piece in pieces]
        lengths = np.array([len(one) for one in ids], dtype=np.int64)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.fromiter(chain.from_iterable(ids), dtype=np.uint32, count=int(ends[-1]))
        return Encoded(tokens, np.repeat(np.array(wanted, dtype=np.bool_), lengths), ends[np.array(starts)])

    def _parts(self, document: Document) -> list[tuple[str | int, bool]]:
        """Texts and special ids in order, each with whether it is wanted."""
        parts: list[tuple[str | int, bool]] = [(self._id[BEGIN], False)]
        if document.plain:
            example = document.examples[0]
            return [*parts, (example.question, False), ("\n", True), (example.reply, True), (self._id[END], True)]
        if document.system is not None:
            parts += [(self._id[SYSTEM], False), (document.system, False), (self._id[END], False)]
        for example in document.examples:
            parts += [(self._id[USER], False), (example.question, False), (self._id[END], False)]
            parts += [(self._id[ASSISTANT], False), (example.reply, True), (self._id[END], True)]
        return parts


def _known(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    if (id := tokenizer.token_to_id(token)) is None:
        raise ValueError(f"the tokenizer has no token {token}; make it with strata.train.vocabulary")
    return id
