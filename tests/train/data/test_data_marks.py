"""Turns that are marked as not learned, as other trainers mark them; and previews of what is learned."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples import toy_data
from strata.cli.data.command import print_preview
from strata.cli.main import app
from strata.text.tokenizer import Tokenizer
from strata.train.data.calibration import file_samples
from strata.train.data.preview import preview
from strata.train.data.tokenize import tokenize
from tests.train.data.test_data_records import TURNS, read
from tests.train.samples import template, write_lines

ROLES = {"system": "system", "user": "human", "assistant": "gpt"}


def marked(at: int, **marks: Any) -> list[dict[str, Any]]:
    return [turn | (marks if number == at else {}) for number, turn in enumerate(TURNS)]


def shared(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same in ShareGPT's fields."""
    return [
        {"from": ROLES[turn["role"]], "value": turn["content"]}
        | {key: value for key, value in turn.items() if key not in ("role", "content")}
        for turn in turns
    ]


MARKS = ("weight", "train", "training", "loss", "loss_scale")


@pytest.mark.parametrize("mark", MARKS)
def test_a_turn_marked_as_not_to_be_learned_is_context(tokenizer: Tokenizer, mark: str) -> None:
    ((text, both),) = read(tokenizer, {"messages": TURNS})
    assert both == "brown fox<|end|>dog<|end|>"
    for off, on in ((0, 1), (0.0, 1.0), (False, True)):
        for turns in (marked(2, **{mark: off}), marked(2, **{mark: off})[:4] + marked(4, **{mark: on})[4:]):
            assert read(tokenizer, {"messages": turns}) == [(text, "dog<|end|>")]
            assert read(tokenizer, {"conversations": shared(turns)}) == [(text, "dog<|end|>")]
            assert read(tokenizer, {"prompt": turns[:2], "completion": turns[2:]}) == [(text, "dog<|end|>")]
        assert read(tokenizer, {"messages": marked(4, **{mark: off})}) == [(text, "brown fox<|end|>")]
        # What is done anyway; Parquet has a null where a message has no such field.
        for at, value in ((2, on), (2, None), (0, off), (1, off), (1, None)):
            assert read(tokenizer, {"messages": marked(at, **{mark: value})}) == [(text, both)]


def test_the_first_turn_may_be_the_assistants_if_it_is_context(tokenizer: Tokenizer) -> None:
    opening = {"role": "assistant", "content": "quick!", "weight": 0}
    ((text, learned),) = read(tokenizer, {"messages": [opening, *TURNS[1:3]]})
    assert "quick!" in text
    assert learned == "brown fox<|end|>"


def test_a_chat_without_a_learned_turn_is_left_out(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    silent = [turn | ({"weight": 0} if turn["role"] == "assistant" else {}) for turn in TURNS]
    assert read(tokenizer, {"messages": silent}) == []
    file = write_lines(tmp_path / "a.jsonl", [{"messages": silent}, {"messages": TURNS}])
    (shard,) = tokenize([file], folder, tmp_path / "out").shards
    assert (shard.documents, shard.left_out) == (1, 1)
    assert len(file_samples(file, tokenizer, 9, 64)) == 1


def test_marks_of_preferences(tokenizer: Tokenizer) -> None:
    record = {"prompt": marked(2, weight=0)[:4], "chosen": [TURNS[4]], "rejected": "no"}
    assert read(tokenizer, record) == read(tokenizer, record | {"prompt": TURNS[:4]})
    assert read(tokenizer, record | {"chosen": marked(4, weight=1)[4:]}) == read(tokenizer, record)
    # Of a reply of several turns, those that are not marked.
    chosen, rejected = read(tokenizer, record | {"prompt": TURNS[:2], "chosen": marked(2, weight=0)[2:]})
    assert (chosen[1], rejected[1]) == ("dog<|end|>", "no<|end|>")
    # A turn that both have is the prompt's, marked in one or in both.
    both = [TURNS[1], TURNS[2] | {"weight": 0}, TURNS[3], TURNS[4]], [*TURNS[1:4], TURNS[4] | {"content": "no"}]
    assert [one[1] for one in read(tokenizer, {"chosen": both[0], "rejected": both[1]})] == ["dog<|end|>", "no<|end|>"]
    with pytest.raises(ValueError, match="'chosen' has no turn that is learned"):
        read(tokenizer, record | {"chosen": marked(4, weight=0)[4:]})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": marked(2, weight=0.5)}, r"messages\[2\]: weight = 0.5 is not supported; accepted are 0 and 1"),
        ({"messages": marked(2, loss_scale=2.0)}, r"messages\[2\]: loss_scale = 2.0 is not supported"),
        ({"messages": marked(2, train="false")}, r"messages\[2\]: train = 'false' is not supported"),
        ({"messages": marked(2, loss=[False])}, r"messages\[2\]: loss = \[False\] is not supported"),
        ({"messages": marked(2, weight=0, train=True)}, r"messages\[2\]: weight = 0 and train = True disagree"),
        ({"messages": marked(1, train=True)}, r"messages\[1\]: train = True, but .* assistant"),
        ({"messages": marked(2, loss_mask=0)}, r"messages\[2\]: the key 'loss_mask' is unknown; .* weight"),
        (
            {"messages": marked(2, train_detail=[{"begin_offset": 0, "end_offset": 3, "train": False}])},
            r"messages\[2\]: 'train_detail' marks parts of a turn",
        ),
        (
            {"messages": marked(2, content=[{"type": "text", "text": "brown", "train": False}])},
            r"messages\[2\]: 'train' marks a part of the content",
        ),
        (
            {"messages": marked(2, content=[{"type": "text", "text": "brown", "weight": 0}])},
            r"messages\[2\]: 'weight' marks a part of the content",
        ),
        ({"conversations": shared(marked(2, colour="red"))}, r"conversations\[2\]: the key 'colour' is unknown"),
        *(
            ({"messages": TURNS, mark: value}, f"{mark} = {value!r} marks the record as a whole, and only turns are")
            for mark, value in (
                ("weight", 0),
                ("loss", False),
                ("loss_scale", 0.5),
                ("train", "false"),
                ("weight", 2),
                ("loss_mask", 0),
            )
        ),
        ({"messages": TURNS, "label": False}, "a chat with a 'label' is no example to follow"),
        ({"conversations": shared(TURNS), "kto_tag": True}, "a chat with a 'kto_tag' is no example to follow"),
    ],
)
def test_marks_that_cannot_be_followed(tokenizer: Tokenizer, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tokenizer, record)


def test_keys_that_are_null_or_that_the_template_reads_are_taken(folder: Path, tokenizer: Tokenizer) -> None:
    plain = read(tokenizer, {"messages": TURNS})
    for more in ({"colour": None, "train_detail": None}, {"reasoning": "hm", "name": "Kim"}):
        assert read(tokenizer, {"messages": marked(2, **more)}) == plain
    for mark in MARKS:  # of a whole record, what is done anyway
        assert (
            read(tokenizer, {"messages": TURNS, mark: 1}) == read(tokenizer, {"messages": TURNS, mark: None}) == plain
        )
    naming = template("{{ m.content }}{{ colour }}{% for colour in [] %}{% endfor %}")
    with (
        Tokenizer.load(folder, naming) as other,  # of a variable, not of a field
        pytest.raises(ValueError, match="the key 'colour' is unknown"),
    ):
        read(other, {"messages": marked(4, colour="red ")})
    with Tokenizer.load(folder, template("{{ m['colour'] }}{{ m.content }}")) as reading:
        assert read(reading, {"messages": marked(4, colour="red ")})[0][1].endswith("red dog<|end|>")


SHOWN_TURNS = [
    {"role": "user", "content": "quick?"},
    {"role": "assistant", "content": "brown fox", "weight": 0},
    {"role": "user", "content": "lazy [bold]?"},
    {"role": "assistant", "content": "größer 東京"},
]


def shown(paths: list[Path], folder: Path, *, terminal: bool = False, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, color_system="standard" if terminal else None, width=80)
    print_preview(preview(paths, folder, **options), console)
    return out.getvalue()


def learned(text: str) -> list[str]:
    """What stands between the signs, after the line that explains them."""
    return re.findall(r"\{\+(.*?)\+\}", text.partition("\n")[2], re.DOTALL)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "chats.jsonl", [{"messages": SHOWN_TURNS}] * 5)


def test_learned_tokens_are_marked_and_the_text_is_whole(folder: Path, chats: Path) -> None:
    (row,) = preview([chats], folder, rows=1)
    (document,) = row.documents
    assert [text for text, is_learned in document.parts if is_learned] == ["größer 東京<|end|>"]
    for content in ("quick?", "brown fox", "lazy [bold]?"):
        assert content in "".join(text for text, is_learned in document.parts if not is_learned)
    text = shown([chats], folder, rows=1)
    assert "{+größer 東京<|end|>+}" in text
    assert "lazy [bold]?" in text
    assert f"{chats}, line 1" in text.replace("\n", "")
    assert "\x1b" not in text
    coloured = shown([chats], folder, terminal=True, rows=1)
    assert re.search(r"\x1b\[[0-9;]*mgrößer 東京", coloured)
    assert "{+größer" not in coloured


def test_as_many_rows_as_asked_for(folder: Path, chats: Path, tmp_path: Path) -> None:
    assert [row.where for row in preview([chats], folder, rows=2)] == [f"{chats}, line {at}" for at in (1, 2)]
    more = write_lines(tmp_path / "more.jsonl", [{"prompt": "a", "completion": "b"}])
    assert len(list(preview([chats, more], folder, rows=9))) == 6


def test_preferences_and_rows_that_are_left_out_say_what_they_are(folder: Path, tmp_path: Path) -> None:
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "quick?", "chosen": "brown fox", "rejected": "no"}])
    text = shown([pairs], folder)
    assert [one.removesuffix("<|end|>") for one in learned(text)] == ["brown fox", "no"]
    assert text.index("chosen") < text.index("brown fox") < text.index("rejected") < text.index("{+no")
    silent = write_lines(tmp_path / "silent.jsonl", [{"messages": SHOWN_TURNS[:2]}, {"messages": SHOWN_TURNS}])
    assert "left out" in shown([silent], folder, rows=1)
    assert "left out" in shown([pairs], folder, longest=2)
    assert "left out" not in shown([pairs], folder)


def test_long_parts_are_cut_in_their_middle(folder: Path, tmp_path: Path) -> None:
    rows = write_lines(
        tmp_path / "long.jsonl", [{"prompt": "one " * 9000, "completion": "two" + " dog" * 9000 + " end"}]
    )
    text = shown([rows], folder)
    assert len(text) < 5000
    (one,) = learned(text)
    assert one.startswith("two dog")
    assert " dog end" in one


def test_control_characters_are_shown_and_not_obeyed(folder: Path, tmp_path: Path) -> None:
    rows = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "\x1b]0;title\x07 \x9b2J\r"}])
    text = shown([rows], folder)
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(text)
    assert r"\x1b]0;title" in text


def test_of_a_text_file_the_beginning_is_shown(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("größer 東京 " * 100_000, encoding="utf-8")
    (tmp_path / "b.txt").write_text("the quick brown fox", encoding="utf-8")
    long, short = preview([tmp_path / "a.txt", tmp_path / "b.txt"], folder)
    assert "".join(text for text, _ in long.documents[0].parts).startswith("größer 東京")
    assert sum(one.tokens for one in long.documents) < 20_000
    assert "<|end|>" not in "".join(text for text, _ in long.documents[-1].parts)
    assert short.documents[0].tokens == short.documents[0].learned + 1


def test_the_command_writes_nothing(folder: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for arguments in (
        [str(chats), "--preview", "--rows", "2", "--model", str(folder)],
        ["--preview", "--rows", "2", "--out", "out", "--model", str(folder), str(chats)],
    ):
        done = CliRunner().invoke(app, ["data", *arguments])
        assert done.exit_code == 0, done.output
        assert len(learned(done.output)) == 2
        assert sorted(tmp_path.rglob("*")) == before


def test_what_is_wrong_is_told_as_without_a_preview(folder: Path, chats: Path, tmp_path: Path) -> None:
    wrong = write_lines(tmp_path / "wrong.jsonl", [{"messages": [SHOWN_TURNS[0], SHOWN_TURNS[1] | {"weight": 3}]}])
    for arguments, message in (
        ([str(wrong), "--preview"], "wrong.jsonl, line 1: messages[1]: weight = 3 is not supported"),
        ([str(chats)], "--out"),
        ([str(chats), "--out", "x", "--rows", "2"], "--rows"),
    ):
        done = CliRunner().invoke(app, ["data", *arguments, "--model", str(folder)])
        assert done.exit_code != 0
        assert message in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: FOLDER"),
        (["{0}/a", "b"], "unrecognized arguments: b"),
        (["{0}/file/a"], "file/a: Not a directory; choose another folder"),
    ],
)
def test_what_toy_data_cannot_use_is_a_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["toy_data.py", *(argument.format(tmp_path) for argument in arguments)])
    with pytest.raises(SystemExit) as stopped:
        toy_data.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
