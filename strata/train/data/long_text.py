"""Long texts: processes encode parts of one, and its shards are cut from the tokens as of the text encoded whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Encoded, text_ids
from strata.train.data.shards import ShardEntry, write_shard
from strata.train.data.sources import FileRange, read_text, split_text
from strata.train.data.writing import ShardJob

# What a process encodes between two reports of progress.
BYTES_PER_CHUNK = 4 * 10**6


@dataclass(frozen=True)
class ChunkJob(ShardJob):
    """The tokens of a part of a text. is_first, is_last: whether it is the first and the last."""

    file_range: FileRange
    tokenizer: Path
    is_first: bool
    is_last: bool

    def write(self) -> ShardEntry:
        """As a shard of one document."""
        text = read_text(self.file_range)
        with Tokenizer.load(self.tokenizer) as tokenizer:
            ids = text_ids(tokenizer, text, is_first=self.is_first, is_last=self.is_last)
            return _write(self, ids, np.array([0, len(ids)]), tokenizer.vocab_size)


@dataclass(frozen=True)
class CutJob(ShardJob):
    """A shard of what `parts` hold one after another: so many tokens, after `skip`, in documents of `longest`."""

    parts: list[ChunkJob]
    skip: int
    tokens: int
    longest: int
    vocab_size: int

    def write(self) -> ShardEntry:
        # A last document of one token predicts nothing.
        end = self.tokens - (self.tokens % self.longest == 1)
        parts = [np.load(part.folder / f"{part.name}.tokens.npy", mmap_mode="r") for part in self.parts]
        tokens = np.concatenate([np.zeros(0, np.uint16), *parts])[self.skip : self.skip + end]
        offsets = np.append(np.arange(0, end, self.longest), end)
        return _write(self, tokens, offsets, self.vocab_size)


class LongText:
    """A text file that is encoded in parts."""

    def __init__(self, shards: Mapping[str, FileRange], folder: Path, tokenizer: Path) -> None:
        """shards: the file_range of the file that each of its shards is made of, in order. folder: for the parts."""
        divided = {name: split_text(file_range, BYTES_PER_CHUNK) for name, file_range in shards.items()}
        ends = [file_range.end for ranges in divided.values() for file_range in ranges]
        self._parts = {
            name: [
                ChunkJob(
                    folder, f"{name}.{at:04}", file_range, tokenizer, file_range.start == 0, file_range.end == ends[-1]
                )
                for at, file_range in enumerate(ranges)
            ]
            for name, ranges in divided.items()
        }

    @property
    def chunks(self) -> list[ChunkJob]:
        return [part for parts in self._parts.values() for part in parts]

    def cuts(self, out: Path, encoded: Mapping[str, ShardEntry], longest: int | None, vocab_size: int) -> list[CutJob]:
        """What makes each shard of the finished parts: a document belongs to the one in whose parts it begins."""
        parts = self.chunks
        starts = list(accumulate((encoded[part.name].tokens for part in parts), initial=0))
        each = longest or max(1, starts[-1])
        jobs, first = [], 0
        for name, own in self._parts.items():
            begin, end = (min(-(-starts[at] // each) * each, starts[-1]) for at in (first, first + len(own)))
            later = zip(parts[first:], starts[first:], strict=False)
            needed = [part for part, start in later if begin < end and start < end]
            jobs.append(CutJob(out, name, needed, begin - starts[first], end - begin, each, vocab_size))
            first += len(own)
        return jobs


def _write(job: ShardJob, tokens: NDArray[Any], offsets: NDArray[np.int64], vocab_size: int) -> ShardEntry:
    loss_mask = np.ones(len(tokens), np.bool_)
    loss_mask[offsets[:-1]] = False
    return write_shard(job.folder, job.name, "text", Encoded(tokens, loss_mask, offsets), vocab_size)
