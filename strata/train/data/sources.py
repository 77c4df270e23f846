"""Input files as records: JSONL, JSON arrays, Parquet and raw text, in ranges that processes can read apart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.files.json_object import why_no_json
from strata.files.json_rows import array_rows, without_mark
from strata.train.data.encoding import last_cut

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "array",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
# Bytes before a limit among which a text is cut, and the fewest of a range: whole characters, whichever they are.
_WINDOW = 2**16
_FEWEST = 8
# Bytes that begin no character.
_WITHIN = bytes(range(0x80, 0xC0))


@dataclass(frozen=True)
class FileRange:
    """A part of an input file, `start` to `end`: bytes of JSONL, of an array's rows or of text, row groups of Parquet.

    A line of JSONL belongs to the range in which it begins. A text is cut where no token reaches across.
    """

    path: str
    format: str
    start: int
    end: int


@dataclass(frozen=True)
class Place:
    """A byte of a file. Its line and its column (characters, from 1) are counted when they are asked for."""

    path: str
    at: int

    @property
    def line(self) -> int:
        return self._counted()[0]

    def __str__(self) -> str:
        line, column = self._counted()
        return f"{self.path}, line {line}" + (f", column {column}" if column > 1 else "")

    def _counted(self) -> tuple[int, int]:
        line, column = 1, 1
        with Path(self.path).open("rb") as stream:
            while stream.tell() < self.at:
                above, newline, beside = stream.read(min(2**20, self.at - stream.tell())).rpartition(b"\n")
                line += above.count(b"\n") + len(newline)
                column = (1 if newline else column) + len(beside.translate(None, _WITHIN))
        return line, column


def file_ranges(paths: Sequence[Path], bytes_per_range: int) -> list[FileRange]:
    """The ranges of files and of all files below folders, in order of their names.

    Raises ValueError for a path that does not exist or has another ending, and when there is nothing to read.
    """
    ranges = []
    for file in _files(paths):
        format = FORMATS[file.suffix]
        size = file.stat().st_size
        if format == "jsonl":
            starts = range(0, size, bytes_per_range)
            ranges += [FileRange(str(file), format, start, min(start + bytes_per_range, size)) for start in starts]
        elif format == "array":
            ranges += _split_array(file, bytes_per_range)
        elif format == "parquet":
            groups = _parquet(file).num_row_groups
            each = max(1, groups * bytes_per_range // max(1, size))
            ranges += [FileRange(str(file), format, at, min(at + each, groups)) for at in range(0, groups, each)]
        elif size:
            ranges += split_text(FileRange(str(file), format, 0, size), bytes_per_range)
    if not ranges:
        raise ValueError(f"no data in {', '.join(map(str, paths))}: every file is empty")
    return ranges


def split_text(file_range: FileRange, bytes_per_range: int) -> list[FileRange]:
    """A range of text in ranges of at most `bytes_per_range` (8 at least), cut where `last_cut` says."""
    starts, each = [file_range.start], max(bytes_per_range, _FEWEST)
    with Path(file_range.path).open("rb") as stream:
        while (limit := starts[-1] + each) < file_range.end:
            begin = max(starts[-1], limit - _WINDOW)
            stream.seek(begin)
            raw = stream.read(limit - begin)
            whole = raw.lstrip(_WITHIN)  # the rest of a character
            # Not between the two characters of a line end, which are read as one.
            text = whole.decode("utf-8", errors="ignore").removesuffix("\r")
            cut = len(text[: last_cut(text)].encode())
            starts.append(begin + len(raw) - len(whole) + cut if cut else limit)
    return [
        FileRange(file_range.path, file_range.format, *ends)
        for ends in zip(starts, [*starts[1:], file_range.end], strict=True)
    ]


def read_range(file_range: FileRange) -> Iterator[tuple[Place | str, dict[str, Any]]]:
    """The records of a range, each with where it stands (for messages). A range of text is one record, its
    "text".

    Raises ValueError for a line that is no JSON object and for text that is no UTF-8.
    """
    if file_range.format == "jsonl":
        yield from _lines(file_range)
    elif file_range.format == "array":
        yield from _array(file_range)
    elif file_range.format == "parquet":
        yield from _rows(file_range)
    else:
        yield file_range.path, {"text": read_text(file_range)}


def read_text(file_range: FileRange) -> str:
    """A range of a text file, with "\\n" for every end of a line. Raises ValueError if it is no UTF-8."""
    with Path(file_range.path).open("rb") as stream:
        stream.seek(file_range.start)
        raw = stream.read(file_range.end - file_range.start)
    text = raw if file_range.start else without_mark(raw)
    try:
        return text.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        at = file_range.start + len(raw) - len(text) + error.start
        raise ValueError(f"{file_range.path} is not UTF-8: {error.reason} at byte {at}; convert it first") from None


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file() and _is_data(file))
            if not found:
                raise ValueError(f"folder {path} holds no file that ends in {', '.join(FORMATS)}")
            yield from found
        elif not path.exists():
            raise ValueError(f"data file {path} does not exist")
        elif path.suffix not in FORMATS:
            raise ValueError(f"{path}: the ending {path.suffix!r} is unknown; accepted are {', '.join(FORMATS)}")
        else:
            yield path


def _is_data(file: Path) -> bool:
    """Of a folder: JSON that is no array is about the data, like dataset_info.json."""
    return file.suffix in FORMATS and (FORMATS[file.suffix] != "array" or _is_array(file))


def _is_array(file: Path) -> bool:
    with file.open("rb") as stream:
        return without_mark(stream.read(2**12)).lstrip().startswith(b"[")


def _split_array(file: Path, bytes_per_range: int) -> list[FileRange]:
    """Ranges of whole rows, of at most so many bytes where that is more than one row. Reads all of the file."""
    if not _is_array(file):
        raise ValueError(f"{file} holds no list of rows ([{{...}}, ...]); name a file of rows a line .jsonl")
    raw = file.read_bytes()
    rows = without_mark(raw)
    before = len(raw) - len(rows)
    ends: list[list[int]] = []
    try:
        for start, end, _ in array_rows(rows):
            if ends and end - ends[-1][0] <= bytes_per_range:
                ends[-1][1] = end
            else:
                ends.append([start, end])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}, {why_no_json(rows, error)}; correct the file") from None
    return [FileRange(str(file), "array", start + before, end + before) for start, end in ends]


def _array(file_range: FileRange) -> Iterator[tuple[Place, dict[str, Any]]]:
    with Path(file_range.path).open("rb") as stream:
        stream.seek(file_range.start)
        rows = stream.read(file_range.end - file_range.start)
    for start, end, record in array_rows(b"[%b]" % rows):
        where = Place(file_range.path, file_range.start + start - 1)
        yield where, _object(record, where, "row", rows[start - 1 : end - 1])


def _object(value: Any, where: Place, what: str, text: bytes) -> dict[str, Any]:
    if not isinstance(value, dict):
        shown = text[:60].decode(errors="replace")
        raise ValueError(f"{where}: the {what} must be a JSON object, got {shown!r}; correct or remove it")
    return value


def _lines(file_range: FileRange) -> Iterator[tuple[Place, dict[str, Any]]]:
    with Path(file_range.path).open("rb") as stream:
        if file_range.start:
            stream.seek(file_range.start - 1)
            stream.readline()  # the rest of a line that begins in the range before
        while (at := stream.tell()) < file_range.end:
            line = without_mark(stream.readline()).rstrip(b"\r\n")
            if not line.strip():
                continue
            where = Place(file_range.path, at)
            try:
                record = json.loads(line.decode())  # of bytes, json guesses the encoding
            except (ValueError, RecursionError) as error:
                why = why_no_json(line, error, where.line)
                raise ValueError(f"{where.path}, {why}; correct or remove the line") from None
            yield where, _object(record, where, "line", line)


def _rows(file_range: FileRange) -> Iterator[tuple[str, dict[str, Any]]]:
    file = _parquet(Path(file_range.path))
    for group in range(file_range.start, file_range.end):
        for number, record in enumerate(file.read_row_group(group).to_pylist()):
            yield f"{file_range.path}, row group {group}, row {number}", _without_nulls(record)


def _without_nulls(value: Any) -> Any:
    """A value of Parquet without what is null in its objects: each there has the keys of all others of its column, so
    that the arguments of one function would be shown as null ones of every call."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


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
