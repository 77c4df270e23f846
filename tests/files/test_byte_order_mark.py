"""A byte order mark, which some editors write before a text, changes nothing of what is read."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.bench.accuracy.passages import read_passages
from strata.files.json_object import read_object, why_no_text
from strata.files.request_rows import read_rows
from strata.files.toml_tables import read_toml
from strata.models.folder import BUILTIN_FOLDER
from strata.serve.batch_file import read_requests
from strata.serve.http.keys import KeySource
from strata.text.tokenizer import Tokenizer, read_templates
from strata.train.data.sources import file_ranges, read_range

ROW = json.dumps({"text": "one two"}) + "\n"
REQUEST = '{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
KEY = "alice:secret\n"


def _records(path: Path) -> list[dict[str, Any]]:
    return [record for one in file_ranges([path], 10**6) for _, record in read_range(one)]


def _passages(path: Path) -> list[tuple[int, ...]]:
    with Tokenizer.load(BUILTIN_FOLDER) as tokenizer:
        return [one.ids for one in read_passages(path, tokenizer, 64)]


def _keys(path: Path) -> Any:
    path.chmod(0o600)
    return KeySource(path, {}).read()


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("config.json", '{"a": 1}', read_object),
        ("run.toml", "[run]\nsteps = 1\n", lambda path: read_toml(path)[0]),
        ("load.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n', lambda path: read_rows(path, ordered=False)),
        ("batch.jsonl", REQUEST % "a" + REQUEST % "b", lambda path: list(read_requests(path))),
        ("keys", KEY, _keys),
        ("chat_template.jinja", "{{ messages }}", lambda path: read_templates(path.parent, {})),
        ("rows.jsonl", ROW + ROW, _records),
        ("text.txt", "one two", _records),
        ("rows.jsonl", ROW + ROW, _passages),
        ("text.txt", "one two", _passages),
    ],
)
def test_every_reader_reads_the_same_with_a_mark(
    name: str, text: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode())
    expected = read(path)
    assert expected
    path.write_bytes(BOM_UTF8 + text.encode())
    assert read(path) == expected


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ('{"prompt": "a"}\n', lambda path: read_rows(path, ordered=False)),
        (ROW, _records),
        (ROW, _passages),
    ],
)
def test_files_that_were_joined_have_marks_within(line: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    marked, plain = tmp_path / "marked.jsonl", tmp_path / "plain.jsonl"
    plain.write_bytes(3 * line.encode())
    marked.write_bytes(3 * (BOM_UTF8 + line.encode()) + BOM_UTF8)
    assert read(marked) == read(plain)


def test_a_line_of_json_may_hold_other_separators(tmp_path: Path) -> None:
    """JSON escapes no U+2028, which Python's splitlines takes for the end of a line."""
    (tmp_path / "a.jsonl").write_text('{"text": "one\u2028two\x85"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "one\u2028two\x85"}) + "\n")
    assert _passages(tmp_path / "a.jsonl") == _passages(tmp_path / "b.jsonl")


def test_columns_do_not_count_the_mark() -> None:
    assert why_no_text(BOM_UTF8 + b"a\xff") == why_no_text(b"a\xff")
