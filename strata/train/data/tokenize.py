"""Tokenizing once: input files become shards, a file_range of a file each."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Document, Encoded
from strata.train.data.long_text import BYTES_PER_CHUNK, LongText
from strata.train.data.records import encode_record, kind_of
from strata.train.data.shards import VERSION, ShardEntry, ShardIndex, documents_per_sample, write_shard
from strata.train.data.sources import FileRange, Place, file_ranges, read_range
from strata.train.data.writing import ShardJob, named, write_manifest, write_missing

# Of the parts of long texts: the folder, which goes when the shards are there.
PARTS = "parts"


@dataclass(frozen=True)
class _TokenizeJob(ShardJob):
    """One shard to write, from a file_range of the input."""

    file_range: FileRange
    tokenizer: Path
    kind: str
    longest: int | None

    def write(self) -> ShardEntry:
        documents: list[Document] = []
        left_out = 0
        with Tokenizer.load(self.tokenizer) as tokenizer:
            for _, encoded in read_documents(tokenizer, self.file_range, self.kind):
                kept = list(fitting(encoded, self.kind, self.longest))
                left_out += not kept
                documents += kept
            whole = Encoded.of(documents)
            return write_shard(self.folder, self.name, self.kind, whole, tokenizer.vocab_size, left_out)


def tokenize(
    paths: Sequence[Path],
    tokenizer_folder: Path,
    out: Path,
    *,
    longest: int | None = None,
    workers: int = 1,
    bytes_per_shard: int = 2**26,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> ShardIndex:
    """Write the shards of `paths` (files, or folders of them) and their index into `out`.

    longest: text is split after so many tokens; chats and preferences with a longer conversation are left out and
    counted. None keeps all.
    report: called with how many shards, and parts of long texts that shards are cut from, are finished, and of how
    many. The shards do not depend on `workers`. Called again after it was stopped, this goes on with what is missing.

    Raises ValueError that names file and place of a record that cannot be used, for data without samples, and if `out`
    holds other data.
    """
    if longest is not None and longest < 2:
        raise ValueError(f"longest = {longest} must be at least 2: the first token of a document is not predicted")
    ranges = file_ranges(paths, bytes_per_shard)
    kind = first_kind(ranges)
    with Tokenizer.load(tokenizer_folder) as tokenizer:
        digest, vocab_size = tokenizer_digest(tokenizer), tokenizer.vocab_size
    made_of = {"kind": kind, "tokenizer": digest, "longest": longest, "files": _files(ranges)}
    write_manifest(
        out, made_of | {"pieces": [[file_range.path, file_range.start, file_range.end] for file_range in ranges]}
    )
    jobs = [_TokenizeJob(out, name, file_range, tokenizer_folder, kind, longest) for name, file_range in named(ranges)]
    shards = _write_all(out, jobs, vocab_size, workers, report)
    if not any(shard.documents for shard in shards):
        left_out = sum(shard.left_out for shard in shards)
        raise ValueError(f"no samples in {', '.join(map(str, paths))}; {left_out} records were empty or too long")
    index = ShardIndex(VERSION, kind, digest, vocab_size, shards)
    index.write(out)
    shutil.rmtree(out / PARTS, ignore_errors=True)
    return index


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """What tells two tokenizers apart: data that one has made means nothing to a model of the other."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()[:16]


def _write_all(
    out: Path, jobs: Sequence[_TokenizeJob], vocab_size: int, workers: int, report: Callable[[int, int], None]
) -> list[ShardEntry]:
    """The shards of all jobs, in their order: each from its file_range, but those of a long text from its encoded
    parts."""
    long = list(_long_texts(jobs))
    missing = [text for text in long if not all(job.finished() for job in text)]
    texts = [LongText({job.name: job.file_range for job in text}, out / PARTS, text[0].tokenizer) for text in missing]
    parts = [part for text in texts for part in text.chunks]
    together = {job.name for text in missing for job in text}
    entries: dict[str, ShardEntry] = {}

    def write(jobs: Sequence[ShardJob]) -> None:
        done_before = len(entries)
        if jobs:
            made = write_missing(jobs, workers, lambda done, _: report(done_before + done, of))
            entries.update((entry.name, entry) for entry in made)

    of = len(jobs) + len(parts)
    write([job for job in jobs if job.name not in together])
    if parts:
        (out / PARTS).mkdir(exist_ok=True)
    write(parts)
    write([cut for text in texts for cut in text.cuts(out, entries, jobs[0].longest, vocab_size)])
    return [entries[job.name] for job in jobs]


def _long_texts(jobs: Sequence[_TokenizeJob]) -> Iterator[list[_TokenizeJob]]:
    """The jobs of each text file that is more than one part."""
    texts: list[list[_TokenizeJob]] = []
    for job in jobs:
        if job.kind == job.file_range.format == "text":
            texts += [[]] if job.file_range.start == 0 else []
            texts[-1].append(job)
    return (text for text in texts if len(text) > 1 or text[0].file_range.end > BYTES_PER_CHUNK)


def read_documents(
    tokenizer: Tokenizer, file_range: FileRange, kind: str
) -> Iterator[tuple[Place | str, list[Document]]]:
    """The documents of each record of a range, with where it stands. Raises ValueError that says so, too."""
    for where, record in read_range(file_range):
        try:
            encoded = encode_record(tokenizer, kind, record)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; correct or remove the record") from None
        yield where, encoded


def fitting(encoded: list[Document], kind: str, longest: int | None) -> Iterator[Document]:
    """Documents of at most `longest` tokens: text in parts, chats and pairs whole or not at all."""
    each = documents_per_sample(kind)
    for start in range(0, len(encoded), each):
        sample = encoded[start : start + each]
        if longest is None or max(len(document.tokens) for document in sample) <= longest:
            # A document of one token predicts nothing.
            yield from (document for document in sample if len(document.tokens) > 1)
        elif kind == "text":
            tokens, loss_mask = sample[0].tokens, sample[0].loss_mask.copy()
            loss_mask[::longest] = False
            for at in range(0, len(tokens) - 1, longest):
                yield Document(tokens[at : at + longest], loss_mask[at : at + longest])


def first_kind(ranges: Sequence[FileRange]) -> str:
    """The kind of the first record. Raises ValueError if it has none, or there is none."""
    for file_range in ranges:
        if file_range.format == "text":
            return "text"
        for where, record in read_range(file_range):
            try:
                return kind_of(record)
            except ValueError as error:
                raise ValueError(f"{where}: {error}; correct or remove the record") from None
    raise ValueError(f"no records in {ranges[0].path} and the files after it")


def _files(ranges: list[FileRange]) -> dict[str, list[int]]:
    """Size and time of change of each file, by which a changed input is noticed."""
    stats = {file_range.path: Path(file_range.path).stat() for file_range in ranges}
    return {path: [stat.st_size, stat.st_mtime_ns] for path, stat in stats.items()}
