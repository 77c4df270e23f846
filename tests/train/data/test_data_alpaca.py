"""Alpaca's rows, and rows in one JSON array: the chats that they stand for."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Document
from strata.train.data.records import encode_record, kind_of
from strata.train.data.shards import TokenDataset
from strata.train.data.tokenize import tokenize


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Iterator[Tokenizer]:
    with Tokenizer.load(folder) as loaded:
        yield loaded


def said(*turns: str) -> list[dict[str, str]]:
    """Turns of the user and of the assistant."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]


def same(one: list[Document], other: list[Document]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.loss_mask, b.loss_mask)
        for a, b in zip(one, other, strict=True)
    )


SYSTEM = {"role": "system", "content": "the box"}
ROW = {"instruction": "quick?", "input": "", "output": "brown fox"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (ROW, said("quick?", "brown fox")),
        ({"instruction": "quick?", "output": "brown fox"}, said("quick?", "brown fox")),
        (ROW | {"input": None, "system": None, "history": None}, said("quick?", "brown fox")),
        (ROW | {"input": "lazy dog"}, said("quick?\nlazy dog", "brown fox")),
        (ROW | {"instruction": "", "input": "lazy dog"}, said("lazy dog", "brown fox")),
        (ROW | {"system": "the box"}, [SYSTEM, *said("quick?", "brown fox")]),
        (
            ROW | {"history": [["one", "two"], ["three", "four"]], "system": "the box"},
            [SYSTEM, *said("one", "two", "three", "four", "quick?", "brown fox")],
        ),
        # As in the first data set of this form, the whole prompt beside its parts.
        ({"text": "Below is an instruction ...", **ROW}, said("quick?", "brown fox")),
    ],
)
def test_a_row_is_the_chat_that_it_says(
    tokenizer: Tokenizer, row: dict[str, Any], messages: list[dict[str, str]]
) -> None:
    assert kind_of(row) == kind_of({"messages": messages})
    assert same(encode_record(tokenizer, "chat", row), encode_record(tokenizer, "chat", {"messages": messages}))


def test_a_row_of_preferences(tokenizer: Tokenizer) -> None:
    row = {"instruction": "quick?", "input": "lazy dog", "chosen": "brown fox", "rejected": "no"}
    assert kind_of(row) == "preference"
    expected = {"prompt": "quick?\nlazy dog", "chosen": "brown fox", "rejected": "no"}
    assert same(encode_record(tokenizer, "preference", row), encode_record(tokenizer, "preference", expected))


@pytest.mark.parametrize("fields", [("messages", "role", "content"), ("conversations", "role", "content")])
def test_a_system_message_beside_a_conversation_is_read_unless_that_has_one(
    tokenizer: Tokenizer, fields: tuple[str, str, str]
) -> None:
    turns = said("quick?", "brown fox")
    whole = encode_record(tokenizer, "chat", {"messages": [SYSTEM, *turns]})
    assert same(encode_record(tokenizer, "chat", {"system": "the box", fields[0]: turns}), whole)
    assert same(encode_record(tokenizer, "chat", {"system": "dog", fields[0]: [SYSTEM, *turns]}), whole)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"output": None}, "the record has the fields instruction, input; accepted are: instruction, output"),
        (ROW | {"output": 5}, "'output' must be a text, got 5"),
        (ROW | {"instruction": 0, "input": "a"}, "'instruction' must be a text, got 0"),
        (ROW | {"instruction": ""}, "'instruction' and 'input' are empty"),
        (ROW | {"input": 4}, "'input' must be a text, got 4"),
        (ROW | {"history": [["one"]]}, r"history\[0\] must be a prompt and its response, two texts, got \['one'\]"),
        (ROW | {"history": "one"}, "'history' must be a list of prompts with their responses, got 'one'"),
        (ROW | {"kto_tag": False}, "'kto_tag'"),
    ],
)
def test_rows_that_cannot_be_used(tokenizer: Tokenizer, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_record(tokenizer, kind_of(row), row)


ROWS = [
    ROW,
    ROW | {"output": 'größer, ["東京"] 🙂 \\" ]},{'},
    ROW | {"history": [["one", "two"]]},
    {"conversations": [{"from": "human", "value": "quick?"}, {"from": "gpt", "value": "dog"}]},
    ROW | {"output": "end"},
]


@pytest.mark.parametrize(
    ("bytes_per_shard", "indent", "mark"), [(1, None, BOM_UTF8), (150, 2, b""), (150, None, b""), (10**6, 2, BOM_UTF8)]
)
def test_an_array_holds_what_lines_hold(
    folder: Path, tmp_path: Path, bytes_per_shard: int, indent: int | None, mark: bytes
) -> None:
    lines, array = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    array.write_bytes(mark + f" {json.dumps(ROWS, indent=indent, ensure_ascii=False)}\n".encode())
    tokenize([lines], folder, tmp_path / "lines")
    index = tokenize([array], folder, tmp_path / "array", bytes_per_shard=bytes_per_shard, workers=1)
    assert len(index.shards) == {1: len(ROWS), 10**6: 1}.get(bytes_per_shard, len(index.shards))
    one, other = TokenDataset(tmp_path / "lines"), TokenDataset(tmp_path / "array")
    assert one.samples == other.samples == len(ROWS)
    for number in range(len(ROWS)):
        assert same(list(one.sample(number)), list(other.sample(number)))


def test_of_a_folder_arrays_are_rows_and_other_json_is_no_data(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.json").write_text(json.dumps(ROWS))
    (data / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json"}}))
    (data / "none.json").write_text("[]")
    (shard,) = tokenize([data], folder, tmp_path / "out").shards
    assert shard.documents == len(ROWS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"instruction": "a"}', r"a\.json holds no list of rows .*\.jsonl"),
        (json.dumps(ROWS)[:-1], r"a\.json, line 1, column \d+: not JSON"),
        ("[\n" + json.dumps(ROW) + "\n" + json.dumps(ROW) + "]", r"a\.json, line 3, column 1: not JSON"),
        ("[" + json.dumps(ROW) + ",]", r"a\.json, line 1, column \d+: not JSON"),
        ("[" + json.dumps(ROW) + "] 1", r"a\.json, line 1, column \d+: not JSON"),
        ("[\n" + json.dumps(ROW) + ",\n 7]", r"a\.json, line 3, column 2: .* must be a JSON object, got '7'"),
        ('["größe"]', r"a\.json, line 1, column 2: .* must be a JSON object"),
        ('[{"größe": 1}, {"instruction": "a"}]', r"a\.json, line 1, column 2: the record has the fields größe"),
        (json.dumps([ROW, {"messages": []}]), r"a\.json, line 1, column 65: messages must be a list with at least one"),
        ("[]", "no data in"),
        ("", r"a\.json holds no list of rows"),
    ],
)
def test_arrays_that_cannot_be_used(folder: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        tokenize([tmp_path / "a.json"], folder, tmp_path / "out")
