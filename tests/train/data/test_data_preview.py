"""`strata data --preview`: what would be learned, row by row, and nothing written."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from strata.cli.data.command import print_preview
from strata.cli.main import app
from strata.train.data.preview import preview

TURNS = [
    {"role": "user", "content": "quick?"},
    {"role": "assistant", "content": "brown fox", "weight": 0},
    {"role": "user", "content": "lazy [bold]?"},
    {"role": "assistant", "content": "größer 東京"},
]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


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
    return lines(tmp_path / "chats.jsonl", [{"messages": TURNS}] * 5)


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
    more = lines(tmp_path / "more.jsonl", [{"prompt": "a", "completion": "b"}])
    assert len(list(preview([chats, more], folder, rows=9))) == 6


def test_preferences_and_rows_that_are_left_out_say_what_they_are(folder: Path, tmp_path: Path) -> None:
    pairs = lines(tmp_path / "pairs.jsonl", [{"prompt": "quick?", "chosen": "brown fox", "rejected": "no"}])
    text = shown([pairs], folder)
    assert [one.removesuffix("<|end|>") for one in learned(text)] == ["brown fox", "no"]
    assert text.index("chosen") < text.index("brown fox") < text.index("rejected") < text.index("{+no")
    silent = lines(tmp_path / "silent.jsonl", [{"messages": TURNS[:2]}, {"messages": TURNS}])
    assert "left out" in shown([silent], folder, rows=1)
    assert "left out" in shown([pairs], folder, longest=2)
    assert "left out" not in shown([pairs], folder)


def test_long_parts_are_cut_in_their_middle(folder: Path, tmp_path: Path) -> None:
    rows = lines(tmp_path / "long.jsonl", [{"prompt": "one " * 9000, "completion": "two" + " dog" * 9000 + " end"}])
    text = shown([rows], folder)
    assert len(text) < 5000
    (one,) = learned(text)
    assert one.startswith("two dog")
    assert " dog end" in one


def test_control_characters_are_shown_and_not_obeyed(folder: Path, tmp_path: Path) -> None:
    rows = lines(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "\x1b]0;title\x07 \x9b2J\r"}])
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
    wrong = lines(tmp_path / "wrong.jsonl", [{"messages": [TURNS[0], TURNS[1] | {"weight": 3}]}])
    for arguments, message in (
        ([str(wrong), "--preview"], "wrong.jsonl, line 1: messages[1]: weight = 3 is not supported"),
        ([str(chats)], "--out"),
        ([str(chats), "--out", "x", "--rows", "2"], "--rows"),
    ):
        done = CliRunner().invoke(app, ["data", *arguments, "--model", str(folder)])
        assert done.exit_code != 0
        assert message in str(done.exception)
