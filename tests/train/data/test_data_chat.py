"""Which tokens of a chat are learned: what generation would write; rows and arrays as LLaMA-Factory has them."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.text.tokenizer import Tokenizer
from strata.train.data.encoding import Document, encode_chat
from strata.train.data.records import encode_record, kind_of
from strata.train.data.shards import TokenDataset
from strata.train.data.tokenize import tokenize
from tests.train.data.test_data_records import TURNS
from tests.train.samples import sample, template, write_lines


def wanted(tokenizer: Tokenizer, document: Document) -> str:
    return tokenizer.decode(document.tokens[document.loss_mask].tolist(), skip_special_tokens=False)


def test_assistant_turns_and_their_ends_are_wanted(tokenizer: Tokenizer) -> None:
    (document,) = encode_chat(tokenizer, TURNS)
    assert document.tokens.tolist() == tokenizer.encode_chat(TURNS, add_generation_prompt=False)
    assert wanted(tokenizer, document) == "brown fox<|end|>dog<|end|>"
    # Before every turn stands exactly the prompt that generation gets.
    for turn in (2, 4):
        prompt = tokenizer.encode_chat(TURNS[:turn])
        assert document.tokens[: len(prompt)].tolist() == prompt
        assert document.loss_mask[len(prompt)]
        assert not document.loss_mask[len(prompt) - 1]


def test_what_a_template_writes_after_the_end_does_not_count(folder: Path) -> None:
    written = template("\n{{ m.content }}", prompt="<|assistant|>\n").replace("<|end|>", "<|end|>\n")
    with Tokenizer.load(folder, written) as tokenizer:
        (document,) = encode_chat(tokenizer, TURNS)
        assert wanted(tokenizer, document) == "brown fox<|end|>dog<|end|>"


def test_a_template_that_rewrites_earlier_turns_gives_a_document_a_turn(folder: Path) -> None:
    """Reasoning is shown in the last turn only, as Qwen3's template does."""
    turns = [turn | {"thinking": "hm"} if turn["role"] == "assistant" else turn for turn in TURNS]
    shown = template("{% if m.thinking and loop.last %}({{ m.thinking }}){% endif %}{{ m.content }}")
    with Tokenizer.load(folder, shown) as tokenizer:
        first, second = encode_chat(tokenizer, turns)
        assert wanted(tokenizer, first) == "(hm)brown fox<|end|>"
        assert wanted(tokenizer, second) == "(hm)dog<|end|>"
        assert second.tokens.tolist()[: len(tokenizer.encode_chat(turns[:4]))] == tokenizer.encode_chat(turns[:4])
        assert "hm" not in tokenizer.decode(second.tokens[~second.loss_mask].tolist())
        for context, left in ((2, second), (4, first)):
            marked = [turn | ({"weight": 0} if at == context else {}) for at, turn in enumerate(turns)]
            assert same(encode_record(tokenizer, "chat", {"messages": marked}), [left])


def test_a_template_without_its_own_generation_prompt_is_refused(folder: Path) -> None:
    with (
        Tokenizer.load(folder, template(prompt="now you speak: ")) as tokenizer,
        pytest.raises(ValueError, match=r"does not write messages\[2\] after its own generation prompt"),
    ):
        encode_chat(tokenizer, TURNS)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TURNS[:2], "no assistant turn"),
        (TURNS[2:3], "the first message is the assistant's"),
        (["hello"], r"messages\[0\] must be like"),
    ],
)
def test_chats_that_cannot_be_used(tokenizer: Tokenizer, messages: list[dict[str, str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_chat(tokenizer, messages)


@pytest.mark.parametrize("empty", [None, [], "", " \n", [{"type": "text", "text": ""}]])
def test_a_turn_that_says_nothing_is_read_and_not_learned(tokenizer: Tokenizer, empty: object) -> None:
    turns = [*TURNS[:2], {"role": "assistant", "content": empty, "tool_calls": []}, *TURNS[3:]]
    (document,) = encode_chat(tokenizer, turns)
    assert wanted(tokenizer, document) == "dog<|end|>"
    assert document.tokens.tolist() == tokenizer.encode_chat(turns, add_generation_prompt=False)
    assert encode_chat(tokenizer, turns[:3]) == []


@pytest.mark.parametrize("said", [{"tool_calls": [{"name": "jump"}]}, {"reasoning": "hm"}, {"refusal": "no"}])
def test_a_turn_without_content_that_says_something_is_learned(folder: Path, said: dict[str, object]) -> None:
    calls = "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    with Tokenizer.load(folder, template("{{ m.thinking }}{{ m.content }}" + calls)) as tokenizer:
        (document,) = encode_chat(tokenizer, [TURNS[1], {"role": "assistant", "content": None, **said}])
        shown = {"tool_calls": '{"name": "jump", "arguments": {}}', "reasoning": "hm", "refusal": "no"}
        assert wanted(tokenizer, document) == shown[next(iter(said))] + "<|end|>"


@pytest.mark.parametrize("nothing", ["", None, []])
def test_a_reply_that_says_nothing_may_be_the_rejected_one(tokenizer: Tokenizer, nothing: object) -> None:
    record = {"prompt": TURNS[:2], "chosen": [TURNS[2]], "rejected": [{"role": "assistant", "content": nothing}]}
    chosen, rejected = encode_record(tokenizer, "preference", record)
    assert (wanted(tokenizer, chosen), wanted(tokenizer, rejected)) == ("brown fox<|end|>", "<|end|>")


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
    write_lines(lines, ROWS)
    array.write_bytes(mark + f" {json.dumps(ROWS, indent=indent, ensure_ascii=False)}\n".encode())
    tokenize([lines], folder, tmp_path / "lines")
    index = tokenize([array], folder, tmp_path / "array", bytes_per_shard=bytes_per_shard, workers=1)
    assert len(index.shards) == {1: len(ROWS), 10**6: 1}.get(bytes_per_shard, len(index.shards))
    one, other = TokenDataset(tmp_path / "lines"), TokenDataset(tmp_path / "array")
    assert one.samples == other.samples == len(ROWS)
    for number in range(len(ROWS)):
        assert same(list(sample(one, number)), list(sample(other, number)))


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
