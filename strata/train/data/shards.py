"""Tokenized data on disk: shards of .npy files that are memory-mapped, and an index with their checksums."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata.train.data.encoding import Document

INDEX = "index.json"
VERSION = 1


@dataclass(frozen=True)
class ShardEntry:
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


@dataclass(frozen=True)
class Index:
    """What a folder of shards holds.

    kind: a key of `encoding.FIELDS`. tokenizer: `tokenizer_digest` of the one that was used; vocab_size: its own.
    """

    version: int
    kind: str
    tokenizer: str
    vocab_size: int
    shards: list[ShardEntry]

    def write(self, folder: Path) -> None:
        """Put index.json in place at once; it makes the folder complete."""
        write_atomically(folder / INDEX, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Raises ValueError if the folder holds no index, or one that this version cannot read."""
        try:
            values = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            if values["version"] != VERSION:
                raise ValueError(f"version {values['version']} is not {VERSION}")
            return cls(**{**values, "shards": [ShardEntry(**shard) for shard in values["shards"]]})
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no tokenized data; make it with `strata data`") from None
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / INDEX} cannot be read: {error!r}; tokenize again") from None


def documents_per_sample(kind: str) -> int:
    """How many documents make a sample: two for a preference, chosen and rejected."""
    return 2 if kind == "preference" else 1


def write_shard(
    folder: Path, name: str, kind: str, documents: Sequence[Document], vocab_size: int, left_out: int
) -> ShardEntry:
    """Write the files of a shard, each whole or not at all. Text needs no mask: all but the first token is wanted."""
    lengths = np.array([len(document.tokens) for document in documents], np.int64)
    small = np.uint16 if vocab_size <= 2**16 else np.uint32
    tokens = np.concatenate([np.zeros(0, small), *(document.tokens for document in documents)]).astype(small)
    arrays: dict[str, NDArray[Any]] = {"tokens": tokens, "offsets": np.concatenate([[0], np.cumsum(lengths)])}
    if kind != "text":
        arrays["wanted"] = np.concatenate([np.zeros(0, np.bool_), *(document.wanted for document in documents)])
    sums = {}
    for part, array in arrays.items():
        file = folder / f"{name}.{part}.npy"
        temporary = file.with_name(f".{file.name}.part")
        with temporary.open("wb") as stream:
            np.save(stream, array, allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        sums[file.name] = _sha256(temporary)
        os.replace(temporary, file)
    longest = int(lengths.reshape(-1, documents_per_sample(kind)).sum(1).max(initial=0))
    return ShardEntry(name, len(documents), len(tokens), longest, int(lengths.max(initial=0)), left_out, sums)


class TokenDataset:
    """The samples of a folder of shards, by number. Nothing but the shards' boundaries is held in memory.

    samples, tokens: how many there are. longest, longest_document: tokens of the longest. skipped: shards left out.
    fingerprint: of all the data that is used; a run that is resumed must have the same.
    """

    def __init__(self, folder: str | Path, *, skip_corrupt: bool = False) -> None:
        """Check every shard against the index, then map it.

        skip_corrupt: go without shards that are damaged instead of raising ValueError with their names.
        """
        self.folder = Path(folder)
        self.index = Index.read(self.folder)
        with ThreadPoolExecutor() as pool:
            faults = list(pool.map(self._fault, self.index.shards))
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
        self._wanted = [self._map(shard, "wanted") for shard in shards] if self.index.kind != "text" else None
        self.samples = int(self._ends[-1])
        self.tokens = sum(shard.tokens for shard in shards)
        self.longest = max(shard.longest for shard in shards)
        self.longest_document = max(shard.longest_document for shard in shards)
        sums = [self.index.tokenizer, *(sum for shard in shards for sum in shard.sha256.values())]
        self.fingerprint = hashlib.sha256(" ".join(sums).encode()).hexdigest()[:16]

    def lengths(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each of the samples `numbers`, [n]."""
        homes = np.searchsorted(self._ends, numbers, side="right")
        lengths = np.empty(len(numbers), np.int64)
        for home in np.unique(homes):
            chosen = homes == home
            places = (numbers[chosen] - self._first(home)) * self._each
            lengths[chosen] = self._offsets[home][places + self._each] - self._offsets[home][places]
        return lengths

    def sample(self, number: int) -> list[Document]:
        """The documents of a sample: one, or two of a preference."""
        home = int(np.searchsorted(self._ends, number, side="right"))
        place = (number - self._first(home)) * self._each
        return [self._document(home, place + at) for at in range(self._each)]

    def _document(self, home: int, place: int) -> Document:
        start, end = self._offsets[home][place : place + 2].tolist()
        tokens = np.array(self._tokens[home][start:end])
        if self._wanted is not None:
            return Document(tokens, np.array(self._wanted[home][start:end]))
        wanted = np.ones(len(tokens), np.bool_)
        wanted[0] = False
        return Document(tokens, wanted)

    def _first(self, home: int) -> int:
        return int(self._ends[home - 1]) if home else 0

    def _map(self, shard: ShardEntry, part: str) -> NDArray[Any]:
        mapped: NDArray[Any] = np.load(self.folder / f"{shard.name}.{part}.npy", mmap_mode="r", allow_pickle=False)
        return mapped

    def _fault(self, shard: ShardEntry) -> str | None:
        for name, sum in shard.sha256.items():
            path = self.folder / name
            if not path.is_file():
                return f"{name} is missing"
            if _sha256(path) != sum:
                return f"{name} does not have the checksum that the index says"
        return None


def write_atomically(path: Path, data: bytes) -> None:
    """A file appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
