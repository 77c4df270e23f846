"""Tokenizing once: input files become shards, a piece of a file each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.models.tokenizer import Tokenizer
from strata.train.data.encoding import Document, encode_record, kind_of
from strata.train.data.shards import VERSION, Index, ShardEntry, documents_per_sample, write_shard
from strata.train.data.sources import Piece, pieces_of, read_piece
from strata.train.data.writing import ShardJob, keep_plan, named, write_missing


@dataclass(frozen=True)
class _Job(ShardJob):
    """One shard to write, from a piece of the input."""

    piece: Piece
    tokenizer: Path
    kind: str
    longest: int | None


def tokenize(
    paths: Sequence[Path],
    tokenizer_folder: Path,
    out: Path,
    *,
    longest: int | None = None,
    workers: int = 1,
    bytes_per_shard: int = 2**26,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Index:
    """Write the shards of `paths` (files, or folders of them) and their index into `out`.

    longest: text is split after so many tokens; chats and preferences with a longer conversation are left out and
    counted. None keeps all.
    report: called with the number of finished shards and of all. The shards do not depend on `workers`. Called again
    after it was stopped, this goes on with the shards that are missing.

    Raises ValueError that names file and place of a record that cannot be used, for data without samples, and if `out`
    holds other data.
    """
    if longest is not None and longest < 2:
        raise ValueError(f"longest = {longest} must be at least 2: the first token of a document is not predicted")
    pieces = pieces_of(paths, bytes_per_shard)
    kind = _first_kind(pieces)
    with Tokenizer.load(tokenizer_folder) as tokenizer:
        digest, vocab_size = tokenizer_digest(tokenizer), tokenizer.vocab_size
    made_of = {"kind": kind, "tokenizer": digest, "longest": longest, "files": _files(pieces)}
    keep_plan(out, made_of | {"pieces": [[piece.path, piece.start, piece.end] for piece in pieces]})
    jobs = [_Job(out, name, piece, tokenizer_folder, kind, longest) for name, piece in named(pieces)]
    shards = write_missing(jobs, _write, workers, report)
    if not any(shard.documents for shard in shards):
        left_out = sum(shard.left_out for shard in shards)
        raise ValueError(f"no samples in {', '.join(map(str, paths))}; {left_out} records were empty or too long")
    index = Index(VERSION, kind, digest, vocab_size, shards)
    index.write(out)
    return index


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """What tells two tokenizers apart: data that one has made means nothing to a model of the other."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:16]


def _write(job: _Job) -> ShardEntry:
    """Read, encode and write one shard."""
    documents: list[Document] = []
    left_out = 0
    with Tokenizer.load(job.tokenizer) as tokenizer:
        for where, record in read_piece(job.piece):
            try:
                encoded = encode_record(tokenizer, job.kind, record)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            fitting = list(_fitting(encoded, job.kind, job.longest))
            left_out += not fitting
            documents += fitting
        return write_shard(job.folder, job.name, job.kind, documents, tokenizer.vocab_size, left_out)


def _fitting(encoded: list[Document], kind: str, longest: int | None) -> Iterator[Document]:
    """Documents of at most `longest` tokens: text in parts, chats and pairs whole or not at all."""
    each = documents_per_sample(kind)
    for start in range(0, len(encoded), each):
        sample = encoded[start : start + each]
        if longest is None or max(len(document.tokens) for document in sample) <= longest:
            # A document of one token predicts nothing.
            yield from (document for document in sample if len(document.tokens) > 1)
        elif kind == "text":
            tokens, wanted = sample[0].tokens, sample[0].wanted.copy()
            wanted[::longest] = False
            for at in range(0, len(tokens) - 1, longest):
                yield Document(tokens[at : at + longest], wanted[at : at + longest])


def _first_kind(pieces: list[Piece]) -> str:
    for piece in pieces:
        for where, record in read_piece(piece):
            try:
                return kind_of(record)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    raise ValueError(f"no records in {pieces[0].path} and the files after it")


def _files(pieces: list[Piece]) -> dict[str, list[int]]:
    """Size and time of change of each file, by which a changed input is noticed."""
    stats = {piece.path: Path(piece.path).stat() for piece in pieces}
    return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}
