"""Tokenizing once: input files become shards, a piece of a file each, by several processes; a stopped run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from strata.models.tokenizer import Tokenizer
from strata.train.data.encoding import Document, encode_record, kind_of
from strata.train.data.shards import VERSION, Index, ShardEntry, documents_per_sample, write_atomically, write_shard
from strata.train.data.sources import Piece, pieces_of, read_piece

PLAN = "plan.json"


@dataclass(frozen=True)
class _Job:
    """One shard to write."""

    folder: str
    name: str
    piece: Piece
    tokenizer: str
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
    _keep_plan(out, {"kind": kind, "tokenizer": digest, "longest": longest, "files": _files(pieces)}, pieces)
    names = [f"shard-{number:05}" for number in range(len(pieces))]
    finished = {name: entry for name in names if (entry := _finished(out, name)) is not None}
    jobs = [
        _Job(str(out), name, piece, str(tokenizer_folder), kind, longest)
        for name, piece in zip(names, pieces, strict=True)
        if name not in finished
    ]
    report(len(finished), len(names))
    for entry in _run(jobs, workers):
        finished[entry.name] = entry
        report(len(finished), len(names))
    if not any(entry.documents for entry in finished.values()):
        left_out = sum(entry.left_out for entry in finished.values())
        raise ValueError(f"no samples in {', '.join(map(str, paths))}; {left_out} records were empty or too long")
    index = Index(VERSION, kind, digest, vocab_size, [finished[name] for name in names])
    index.write(out)
    return index


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """What tells two tokenizers apart: data that one has made means nothing to a model of the other."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:16]


def write_piece(job: _Job) -> ShardEntry:
    """Read, encode and write one shard; its entry as JSON beside it, last, says that it is whole."""
    folder = Path(job.folder)
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
        entry = write_shard(folder, job.name, job.kind, documents, tokenizer.vocab_size, left_out)
    write_atomically(folder / f"{job.name}.json", json.dumps(asdict(entry)).encode())
    return entry


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


def _run(jobs: list[_Job], workers: int) -> Iterator[ShardEntry]:
    if min(workers, len(jobs)) <= 1:
        yield from map(write_piece, jobs)
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
        futures = [pool.submit(write_piece, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise ValueError(
                "a process that tokenizes was killed, perhaps for lack of memory; "
                "run the same command with fewer workers: finished shards are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


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


def _keep_plan(out: Path, plan: dict[str, Any], pieces: list[Piece]) -> None:
    """Write down what `out` is made of, or check that it is being made of the same."""
    plan["pieces"] = [[piece.path, piece.start, piece.end] for piece in pieces]
    out.mkdir(parents=True, exist_ok=True)
    if not (out / PLAN).exists():
        write_atomically(out / PLAN, json.dumps(plan, indent=1).encode())
        return
    before = json.loads((out / PLAN).read_text(encoding="utf-8"))
    if different := [key for key in plan if plan[key] != before.get(key)]:
        raise ValueError(f"{out} holds data made with other {' and '.join(different)}; choose another folder")


def _finished(out: Path, name: str) -> ShardEntry | None:
    try:
        entry = ShardEntry(**json.loads((out / f"{name}.json").read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None
    return entry if all((out / file).is_file() for file in entry.sha256) else None
