"""The exercises as tokenized data: a tokenizer made from them, and shards of a fixed range of documents each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from strata.text.tokenizer import Tokenizer
from strata.train.data.encode import Encoder
from strata.train.data.encoding import Encoded
from strata.train.data.shards import VERSION, ShardEntry, ShardIndex, write_shard
from strata.train.data.tokenize import tokenizer_digest
from strata.train.data.writing import ShardJob, in_process, named, write_manifest, write_missing
from strata.train.tasks.mixture import document
from strata.train.tasks.vocabulary import make_tokenizer, write_tokenizer

# Tokens: what tokenizer_config.json says that a model of the exercises reads. None has so many.
LONGEST = 1024
# Documents that are encoded at once, which bounds the memory of a process.
_AT_ONCE = 4096


@dataclass(frozen=True)
class _ExerciseJob(ShardJob):
    """The documents first to end - 1 of a seed."""

    first: int
    end: int
    seed: int
    tokenizer: Path
    vocab_size: int

    def write(self) -> ShardEntry:
        encoder = Encoder.load(self.tokenizer)
        encoded = Encoded.of([
            encoder.encode([document(self.seed, index) for index in range(first, min(first + _AT_ONCE, self.end))])
            for first in range(self.first, self.end, _AT_ONCE)
        ])  # fmt: skip
        if (longest := encoded.lengths.max()) > LONGEST:
            number = self.first + int(encoded.lengths.argmax())
            raise ValueError(f"document {number} has {longest} tokens, over {LONGEST}")
        return write_shard(self.folder, self.name, "chat", encoded, self.vocab_size)


def write_exercises(
    out: Path,
    documents: int,
    *,
    tokenizer_folder: Path | None = None,
    seed: int = 0,
    vocab_size: int = 4096,
    tokenizer_documents: int = 60_000,
    workers: int = 1,
    documents_per_shard: int = 65_536,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> ShardIndex:
    """Write documents 0 to `documents` - 1 of a seed into `out` as chats whose replies are wanted, and their index.

    tokenizer_folder: of a tokenizer that has the special tokens of train/tasks/vocabulary.py. Without one it is made: a
    byte-level BPE of `vocab_size` tokens from the first `tokenizer_documents` documents, which goes to out/tokenizer.
    report: called with the number of finished shards and of all. The shards do not depend on `workers`. Called again
    after it was stopped, this goes on with the shards that are missing.

    Raises ValueError for a tokenizer without those tokens, a size out of range, and if `out` holds other data.
    """
    if documents < 1:
        raise ValueError(f"documents = {documents} must be positive")
    if not 512 <= vocab_size <= 65_536:
        raise ValueError(f"vocab_size = {vocab_size} must lie in 512..65536")
    manifest = {"kind": "exercises", "seed": seed, "documents": documents, "documents_per_shard": documents_per_shard}
    if tokenizer_folder is None:
        tokenizer_folder = out / "tokenizer"
        write_manifest(out, manifest | {"vocab_size": vocab_size, "tokenizer_documents": tokenizer_documents})
        if not (tokenizer_folder / "tokenizer.json").exists():
            report(0, -(-documents // documents_per_shard))
            in_process(partial(_make_tokenizer, tokenizer_folder, seed, tokenizer_documents, vocab_size))
        digest, size = _digest_and_size(tokenizer_folder)
    else:
        digest, size = _digest_and_size(tokenizer_folder)
        write_manifest(out, manifest | {"tokenizer": digest})
    jobs = [
        _ExerciseJob(out, name, first, min(first + documents_per_shard, documents), seed, tokenizer_folder, size)
        for name, first in named(range(0, documents, documents_per_shard))
    ]
    index = ShardIndex(VERSION, "chat", digest, size, write_missing(jobs, workers, report))
    index.write(out)
    return index


def _make_tokenizer(folder: Path, seed: int, documents: int, vocab_size: int) -> None:
    first = (document(seed, index) for index in range(documents))
    write_tokenizer(make_tokenizer(first, vocab_size), folder, LONGEST)


def _digest_and_size(tokenizer_folder: Path) -> tuple[str, int]:
    with Tokenizer.load(tokenizer_folder) as tokenizer:
        return tokenizer_digest(tokenizer), tokenizer.vocab_size
