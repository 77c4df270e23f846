"""Tokenized data on disk: shards of .npy files that are memory-mapped, and an index with their checksums."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from strata.train.data.encoding import Encoded
from strata.train.data.permutation import mixed, permuted

INDEX = "index.json"
VERSION = 1
# Of the order in which samples are held out: no seed of a run changes what it is measured by.
_ORDER_OF_PARTS = 0


class ShardEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the index says of a shard. longest: tokens of its longest sample; longest_document: of its longest document.

    left_out: records that gave no sample, being too long or empty. sha256: of each of its files, by name.
    """

    name: str
    documents: int
    tokens: int
    longest: int
    longest_document: int
    left_out: int
    sha256: dict[str, str]


class ShardIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a folder of shards holds.

    kind: "text", "chat" or "preference". tokenizer: `tokenizer_digest` of the one that was used; vocab_size: its own.
    """

    version: int
    kind: str
    tokenizer: str
    vocab_size: int
    shards: list[ShardEntry]

    def write(self, folder: Path) -> None:
        """Put index.json in place at once; it makes the folder complete."""
        write_atomically(folder / INDEX, msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def read(cls, folder: Path) -> ShardIndex:
        """Raises ValueError if the folder holds no index, or one that this version cannot read."""
        try:
            index = msgspec.json.decode((folder / INDEX).read_bytes(), type=cls)
            if index.version != VERSION:
                raise ValueError(f"version {index.version} is not {VERSION}")
            return index
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no tokenized data; make it with `strata data`") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder / INDEX} cannot be read: {error}; tokenize again") from None


def documents_per_sample(kind: str) -> int:
    """How many documents make a sample: two for a preference, chosen and rejected."""
    return 2 if kind == "preference" else 1


def write_shard(folder: Path, name: str, kind: str, encoded: Encoded, vocab_size: int, left_out: int = 0) -> ShardEntry:
    """Write the files of a shard, each whole or not at all. Text needs no mask: all but the first token of a document
    counts in the loss."""
    tokens, lengths = encoded.tokens, encoded.lengths
    small = np.uint16 if vocab_size <= 2**16 else np.uint32
    arrays: dict[str, NDArray[Any]] = {"tokens": tokens.astype(small), "offsets": encoded.offsets}
    if kind != "text":
        arrays["wanted"] = encoded.loss_mask
    sums = {}
    for part, array in arrays.items():
        file = folder / f"{name}.{part}.npy"
        with _appearing_whole(file) as stream:
            # np.save does not say why the system refused to write.
            np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
            stream.write(array.data)
        sums[file.name] = _sha256(file)
    longest = int(lengths.reshape(-1, documents_per_sample(kind)).sum(1).max(initial=0))
    return ShardEntry(name, len(lengths), len(tokens), longest, int(lengths.max(initial=0)), left_out, sums)


@dataclass(frozen=True)
class Spans:
    """Where documents lie: the shard, the first token there and how many tokens, [documents] int64 each."""

    shards: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def indices(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """starts[0], starts[0] + 1, ..., lengths[0] of them, then those from starts[1] on, and so forth."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])


class TokenDataset:
    """The samples of a folder of shards, by number. Nothing but the shards' boundaries is held in memory.

    samples, tokens: how many there are. longest, longest_document: tokens of the longest. skipped: shards left out.
    fingerprint: of all the data that is used; a run that is resumed must have the same.
    """

    def __init__(self, folder: str | Path, *, skip_corrupt: bool = False, checksums: bool = True) -> None:
        """Check every shard against the index, then map it.

        skip_corrupt: go without shards that are damaged instead of raising ValueError with their names. checksums: of
        every file, which has to be read for it; without them it only has to be there.
        """
        self.folder = Path(folder)
        self.index = ShardIndex.read(self.folder)
        with ThreadPoolExecutor() as pool:
            faults = list(pool.map(partial(self._fault, checksums=checksums), self.index.shards))
        self.skipped = [shard.name for shard, fault in zip(self.index.shards, faults, strict=True) if fault]
        if self.skipped and not skip_corrupt:
            raise ValueError(
                f"{self.folder} is damaged: {next(fault for fault in faults if fault)} ({len(self.skipped)} of "
                f"{len(faults)} shards: {', '.join(self.skipped)}); remove {INDEX} and these and tokenize again, "
                f"or set skip_corrupt to train without them"
            )
        shards = [shard for shard in self.index.shards if shard.name not in self.skipped and shard.documents]
        if not shards:
            raise ValueError(f"{self.folder} holds no samples")
        self._each = documents_per_sample(self.index.kind)
        self._ends = np.cumsum([shard.documents // self._each for shard in shards])
        self._tokens = [self._map(shard, "tokens") for shard in shards]
        self._offsets = [self._map(shard, "offsets") for shard in shards]
        self._loss_mask = [self._map(shard, "wanted") for shard in shards] if self.index.kind != "text" else None
        self.samples = int(self._ends[-1])
        self.tokens = sum(shard.tokens for shard in shards)
        self.longest = max(shard.longest for shard in shards)
        self.longest_document = max(shard.longest_document for shard in shards)
        sums = [self.index.tokenizer, *(sum for shard in shards for sum in shard.sha256.values())]
        self.fingerprint = _digest(sums)
        self._part: range | None = None

    def divided(self, share: float) -> tuple[TokenDataset, TokenDataset]:
        """All but a share of the samples, and that share: drawn at random, the same ones whenever they are drawn of as
        many. Raises ValueError if one of both would have none.
        """
        held = max(1, round(self.samples * share))
        if held == self.samples:
            raise ValueError(
                f"{self.folder} has {self.samples} sample(s), of which a share of {share:g} leaves none to train on; "
                "lower it, or give more data"
            )
        out, kept = self._of(range(held)), self._of(range(held, self.samples))
        out.tokens = int(out.lengths(np.arange(held)).sum())
        kept.tokens = self.tokens - out.tokens
        return kept, out

    def _of(self, part: range) -> TokenDataset:
        """The samples that stand at these places of a fixed random order of all."""
        made = copy.copy(self)
        made._part, made.samples = part, len(part)
        made.fingerprint = _digest([self.fingerprint, str(part.start), str(part.stop)])
        return made

    def spans(self, numbers: NDArray[np.int64]) -> Spans:
        """Where the documents of the samples `numbers` [n] lie: one of each sample, or two of a preference."""
        if self._part is not None:
            numbers = permuted(numbers + self._part.start, int(self._ends[-1]), mixed(_ORDER_OF_PARTS))
        homes = np.searchsorted(self._ends, numbers, side="right")
        first = np.concatenate([[0], self._ends])[homes]
        places = ((numbers - first) * self._each)[:, None] + np.arange(self._each)
        spans = Spans(homes.repeat(self._each), np.empty(places.size, np.int64), np.empty(places.size, np.int64))
        for home in np.unique(homes):
            chosen = spans.shards == home
            offsets, at = self._offsets[home], places.reshape(-1)[chosen]
            spans.starts[chosen] = offsets[at]
            spans.lengths[chosen] = offsets[at + 1] - offsets[at]
        return spans

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each of the samples `numbers`, [n]."""
        lengths: NDArray[np.int64] = self.spans(numbers).lengths.reshape(-1, self._each).sum(1)
        return lengths

    def copy(self, spans: Spans, into: Encoded, at: NDArray[np.int64]) -> None:
        """Put the tokens of each span, and which count in the loss, into `into` from index at[i] on; `at` is
        [documents]."""
        if self._loss_mask is None:
            into.loss_mask[indices(at, spans.lengths)] = True
            into.loss_mask[at] = False
        for home in np.unique(spans.shards):
            chosen = spans.shards == home
            source = indices(spans.starts[chosen], spans.lengths[chosen])
            target = indices(at[chosen], spans.lengths[chosen])
            into.tokens[target] = self._tokens[home][source]
            if self._loss_mask is not None:
                into.loss_mask[target] = self._loss_mask[home][source]

    def _map(self, shard: ShardEntry, part: str) -> NDArray[Any]:
        """An array of a shard. torch maps it, since Python's mmap keeps a file open, and many shards are too many."""
        import torch  # here, for the processes that only write shards have no use for it

        path = self.folder / f"{shard.name}.{part}.npy"
        with path.open("rb") as stream:
            if (version := np.lib.format.read_magic(stream)) != (1, 0):
                raise ValueError(f"{path} has the .npy format {version}; only (1, 0) is read")
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            start = stream.tell()
        raw = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8).numpy()
        mapped: NDArray[Any] = raw[start:].view(dtype).reshape(shape)
        return mapped

    def _fault(self, shard: ShardEntry, checksums: bool) -> str | None:
        for name, sum in shard.sha256.items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if checksums and _sha256(path) != sum:
                return f"{name} does not have the checksum that the index says"
        return None


def write_atomically(path: Path, data: bytes) -> None:
    """A file appears whole or not at all. Raises ValueError if it cannot be written."""
    with _appearing_whole(path) as stream:
        stream.write(data)


@contextmanager
def _appearing_whole(path: Path) -> Iterator[BinaryIO]:
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror}; mend that and run the same command again: what is finished is kept"
        ) from None


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
