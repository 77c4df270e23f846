"""Both engines side by side, from a results file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import table


def served(engine: str, turn: int, ttft: float, tail: float, tpot: float, rate: float, **other: Any) -> dict[str, Any]:
    return {
        "test": "T5",
        "model": "8B",
        "load": "10/s",
        "ttft_ms": {"p50": ttft, "p99": tail},
        "tpot_ms": {"p50": tpot},
        "output_tokens_per_second": rate,
        "requests": 250,
        "completed": 250,
        **origin(engine, turn),
        **other,
    }


def offline(engine: str, turn: int, test: str, value: float, unit: str) -> dict[str, Any]:
    return {"test": test, "model": "0.6B", "dtype": "bf16", "value": value, "unit": unit, **origin(engine, turn)}


def origin(engine: str, turn: int, run: str = "B") -> dict[str, Any]:
    version = {"strata": "0.1.0", "vllm": "0.25.1"}[engine]
    where = {"device": "NVIDIA H200", "date": "2026-11-22", "commit": "0123456789abcdef"}
    return {"engine": engine, "version": version, "run": run, "turn": turn, **where}


def shown(lines: list[dict[str, Any]]) -> list[str]:
    return table.tables(lines).splitlines()


def test_served_loads_side_by_side() -> None:
    lines = [
        served("strata", 0, 15.0, 31.0, 4.5, 1257.0),
        served("vllm", 0, 18.2, 29.6, 5.16, 1255.0),
        served("vllm", 1, 18.4, 29.6, 5.16, 1255.0),
        served("strata", 1, 14.0, 31.0, 4.5, 1257.0),
    ]
    assert shown(lines) == [
        "Strata 0.1.0 (commit 0123456) / vLLM 0.25.1, in turns on one machine (NVIDIA H200, 2026-11-22); turns of "
        "each, whose medians stand here: 2; figures within 1% are level.",
        "",
        "| load | TTFT p50 | TTFT p99 | TPOT p50 | tok/s | ahead |",
        "|---|---|---|---|---|---|",
        "| 8B, 10/s | 14.5 / 18.3 | 31 / 29.6 | 4.5 / 5.16 | 1,257 / 1,255 | "
        "Strata: TTFT p50, TPOT p50; vLLM: TTFT p99 |",
    ]


def test_what_some_loads_have_is_a_column_only_where_one_has_it() -> None:
    turns = {"first_turns_ttft_ms": {"p50": 90.0}, "late_turns_ttft_ms": {"p50": 45.0}}
    lines = [
        served("strata", 0, 15.0, 31.0, 4.5, 1257.0, ttft_ms={"mean": 20.0, "p50": 15.0, "p99": 31.0}),
        served("strata", 0, 15.0, 31.0, 4.5, 1257.0, load="agents", **turns),
        served("vllm", 0, 15.0, 31.0, 4.5, 1257.0, load="agents", **(turns | {"late_turns_ttft_ms": {"p50": 90.0}})),
    ]
    assert shown(lines)[2:] == [
        "| load | TTFT mean | TTFT p50 | TTFT p99 | first turns' p50 | late turns' p50 | TPOT p50 | tok/s | ahead |",
        "|---|---|---|---|---|---|---|---|---|",
        "| 8B, 10/s | 20 / - | 15 / - | 31 / - | - / - | - / - | 4.5 / - | 1,257 / - | only Strata ran |",
        "| 8B, agents | - / - | 15 / 15 | 31 / 31 | 90 / 90 | 45 / 90 | 4.5 / 4.5 | 1,257 / 1,257 | Strata |",
    ]


def test_one_engine_is_ahead_where_the_other_is_in_nothing() -> None:
    lines = [
        served("strata", 0, 19.0, 35.0, 5.2, 1000.0, load="a"),
        served("vllm", 0, 18.0, 30.0, 5.2, 1200.0, load="a"),
        served("strata", 0, 18.0, 30.0, 5.2, 1000.0, load="b"),
        served("vllm", 0, 18.0, 30.1, 5.2, 1000.0, load="b"),
        served("strata", 0, 18.0, 30.0, 5.2, 1000.0, load="c"),
    ]
    assert [line.split("|")[-2].strip() for line in shown(lines)[4:]] == ["vLLM", "level", "only Strata ran"]
    assert "| 18 / - |" in shown(lines)[-1]


def test_failed_requests_are_told_and_a_load_without_answers_has_no_figures() -> None:
    lines = [
        served("strata", 0, 10.0, 20.0, 4.0, 1000.0),
        served("vllm", 0, 1.0, 1.0, 1.0, 0.0, ttft_ms=None, tpot_ms=None, completed=0),
    ]
    row = shown(lines)[-1]
    assert row == "| 8B, 10/s | 10 / - | 20 / - | 4 / - | 1,000 / 0 | Strata (vLLM failed 250 of 250 requests) |"


def test_offline_tests_side_by_side() -> None:
    lines = [
        offline("strata", 0, "T1", 26_000.0, "tok/s"),
        offline("strata", 0, "T2", 0.68, "ms"),
        offline("vllm", 0, "T1", 20_000.0, "tok/s"),
        offline("vllm", 0, "T2", 0.34, "ms"),
    ]
    assert shown(lines)[2:] == [
        "| test | figure | ahead |",
        "|---|---|---|",
        "| T1 0.6B bf16, tok/s | 26,000 / 20,000 | Strata by 30.0% |",
        "| T2 0.6B bf16, ms | 0.68 / 0.34 | vLLM by 100.0% |",
    ]


def test_a_row_is_of_one_run_of_both() -> None:
    old = [
        served("strata", 0, 99.0, 99.0, 9.0, 1.0) | {"run": "A"},
        served("vllm", 0, 99.0, 99.0, 9.0, 1.0) | {"run": "A", "version": "0.24"},
    ]
    new = [served("strata", 0, 10.0, 20.0, 4.0, 1000.0), served("vllm", 0, 20.0, 40.0, 8.0, 500.0)]
    assert shown(old + new) == shown(new)
    # A newer run of one engine alone does not borrow the other's figures.
    assert shown([*old, new[0]]) == shown(old)


def test_both_tables_come_from_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [served("strata", 0, 10.0, 20.0, 4.0, 1000.0), offline("strata", 0, "T1", 26_000.0, "tok/s")]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    table.main()
    assert capsys.readouterr().out.rstrip("\n") == table.tables(lines)
    assert [line.split("|")[1].strip() for line in shown(lines) if line.startswith("| ")] == [
        "test",
        "T1 0.6B bf16, tok/s",
        "load",
        "8B, 10/s",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ('{"test": "T1", "model": "8B"}', "line 1: no result of offline_in_turns or serve_in_turns"),
        ("[]", "line 1: no result"),
        ("", "has no results"),
    ],
)
def test_a_file_of_something_else_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["table.py", str(path)])
    with pytest.raises(SystemExit, match=message) as ended:
        table.main()
    assert str(path) in str(ended.value)


def test_a_run_cut_short_does_not_hide_a_whole_one() -> None:
    whole = [served("strata", 0, 15.0, 31.0, 4.5, 1257.0), served("vllm", 0, 18.2, 29.6, 5.16, 1255.0)]
    cut = [served("strata", 0, 14.0, 30.0, 4.4, 1300.0, run="C")]
    alone = [served("strata", 0, 14.0, 30.0, 4.4, 1300.0, run="C", load="new")]
    rows = shown([*whole, *cut, *alone])[4:]
    assert rows == [*shown(whole)[4:], *shown(alone)[4:]]


def test_engines_that_are_both_at_nothing_are_level() -> None:
    nothing: dict[str, Any] = {"ttft_ms": None, "tpot_ms": None, "completed": 0}
    lines = [served(engine, 0, 1.0, 1.0, 1.0, 0.0, **nothing) for engine in ("strata", "vllm")]
    failed = "(Strata failed 250 of 250 requests) (vLLM failed 250 of 250 requests)"
    assert shown(lines)[-1] == f"| 8B, 10/s | - / - | - / - | - / - | 0 / 0 | level {failed} |"


def test_turns_that_one_engine_lacks_are_told() -> None:
    lines = [served("strata", turn, 15.0, 31.0, 4.5, 1257.0) for turn in range(3)]
    lines += [served("vllm", turn, 18.2, 29.6, 5.16, 1255.0) for turn in range(2)]
    assert "turns of each, whose medians stand here: 2 to 3;" in shown(lines)[0]


@pytest.mark.parametrize("missing", ["load", "requests", "version", "model"])
def test_a_line_that_lacks_something_is_named(tmp_path: Path, missing: str) -> None:
    line = served("strata", 0, 15.0, 31.0, 4.5, 1257.0)
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(line) + "\n" + json.dumps({name: line[name] for name in line if name != missing}))
    with pytest.raises(ValueError, match=f"line 2: no result of offline_in_turns or serve_in_turns: no {missing}"):
        table.read(file)
