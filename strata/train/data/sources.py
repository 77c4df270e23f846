"""Input files as records: JSONL, Parquet and raw text, in pieces that processes can read apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "text", ".md": "text"}


@dataclass(frozen=True)
class Piece:
    """A part of an input file, `start` to `end`: bytes of JSONL, row groups of Parquet, the whole of a text file.

    A line of JSONL belongs to the piece in which it begins.
    """

    path: str
    format: str
    start: int
    end: int


def pieces_of(paths: Sequence[Path], bytes_per_piece: int) -> list[Piece]:
    """The pieces of files and of all files below folders, in order of their names.

    Raises ValueError for a path that does not exist or has another ending, and when there is nothing to read.
    """
    pieces = []
    for file in _files(paths):
        format = FORMATS[file.suffix]
        size = file.stat().st_size
        if format == "jsonl":
            starts = range(0, size, bytes_per_piece)
            pieces += [Piece(str(file), format, start, min(start + bytes_per_piece, size)) for start in starts]
        elif format == "parquet":
            groups = _parquet(file).num_row_groups
            each = max(1, groups * bytes_per_piece // max(1, size))
            pieces += [Piece(str(file), format, at, min(at + each, groups)) for at in range(0, groups, each)]
        elif size:
            pieces.append(Piece(str(file), format, 0, size))
    if not pieces:
        raise ValueError(f"no data in {', '.join(map(str, paths))}: every file is empty")
    return pieces


def read_piece(piece: Piece) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a piece, each with where it stands (for messages). A text file is one record, its "text".

    Raises ValueError for a line that is no JSON object and for text that is no UTF-8.
    """
    if piece.format == "jsonl":
        yield from _lines(piece)
    elif piece.format == "parquet":
        yield from _rows(piece)
    else:
        try:
            yield piece.path, {"text": Path(piece.path).read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise ValueError(f"{piece.path} is not UTF-8: {error}; convert it first") from None


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix in FORMATS)
            if not found:
                raise ValueError(f"folder {path} holds no file that ends in {', '.join(FORMATS)}")
            yield from found
        elif not path.exists():
            raise ValueError(f"data file {path} does not exist")
        elif path.suffix not in FORMATS:
            raise ValueError(f"{path}: the ending {path.suffix!r} is unknown; accepted are {', '.join(FORMATS)}")
        else:
            yield path


def _lines(piece: Piece) -> Iterator[tuple[str, dict[str, Any]]]:
    with Path(piece.path).open("rb") as stream:
        if piece.start:
            stream.seek(piece.start - 1)
            stream.readline()  # the rest of a line that begins in the piece before
        while (at := stream.tell()) < piece.end:
            line = stream.readline()
            if not line.strip():
                continue
            where = f"{piece.path}, byte {at}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: the line is not JSON ({error})") from None
            if not isinstance(record, dict):
                raise ValueError(f"{where}: the line must be a JSON object, got {line[:60].decode(errors='replace')!r}")
            yield where, record


def _rows(piece: Piece) -> Iterator[tuple[str, dict[str, Any]]]:
    file = _parquet(Path(piece.path))
    for group in range(piece.start, piece.end):
        for number, record in enumerate(file.read_row_group(group).to_pylist()):
            yield f"{piece.path}, row group {group}, row {number}", record


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install 'strata-llm[parquet]'") from None
    try:
        return ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None
