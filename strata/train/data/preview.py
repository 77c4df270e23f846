"""The first rows of data as they would be learned, for people to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Document
from strata.train.data.sources import FileRange, Place, file_ranges, split_text
from strata.train.data.tokenize import first_kind, fitting, read_documents

# Bytes of a text file that its row has at most.
_BEGINNING = 2**12


@dataclass(frozen=True)
class ShownDocument:
    """parts: texts one after another, each with whether the loss counts it. tokens, learned: how many there are, and
    how many the loss counts."""

    parts: list[tuple[str, bool]]
    tokens: int
    learned: int


@dataclass(frozen=True)
class ShownRow:
    """where: its file and place. documents: none if the row is left out; of a preference chosen and rejected."""

    where: str
    kind: str
    documents: list[ShownDocument]


def preview(
    paths: Sequence[Path], tokenizer_folder: Path, *, rows: int = 3, longest: int | None = None
) -> Iterator[ShownRow]:
    """The first `rows` rows of files and folders, as `tokenize` takes them; of a text file its beginning is one.

    Raises ValueError as `tokenize` does.
    """
    ranges = file_ranges(paths, 2**62)
    kind = first_kind(ranges)
    with Tokenizer.load(tokenizer_folder) as tokenizer:
        documents = (row for one in ranges for row in _documents(tokenizer, one, kind))
        for where, encoded in islice(documents, rows):
            yield ShownRow(str(where), kind, [_shown(tokenizer, one) for one in fitting(encoded, kind, longest)])


def _documents(tokenizer: Tokenizer, file_range: FileRange, kind: str) -> Iterator[tuple[Place | str, list[Document]]]:
    if file_range.format != "text" or file_range.end <= _BEGINNING:
        yield from read_documents(tokenizer, file_range, kind)
        return
    beginning, *_ = split_text(replace(file_range, end=min(2 * _BEGINNING, file_range.end)), _BEGINNING)
    for where, (document,) in read_documents(tokenizer, beginning, kind):
        # The text goes on, so without what closes it.
        yield f"{where} (its beginning)", [Document(document.tokens[:-1], document.loss_mask[:-1])]


def _shown(tokenizer: Tokenizer, document: Document) -> ShownDocument:
    """Each part is what its tokens add to the text before: a decoder may drop a space at the beginning of a text."""
    ids, counted = document.tokens.tolist(), document.loss_mask
    ends = [*(np.flatnonzero(np.diff(counted)) + 1).tolist(), len(ids)]
    texts = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in ends]
    begins = [0, *(len(text) for text in texts)]
    parts = [(text[begin:], bool(counted[end - 1])) for text, begin, end in zip(texts, begins, ends, strict=False)]
    return ShownDocument(parts, len(ids), int(counted.sum()))
