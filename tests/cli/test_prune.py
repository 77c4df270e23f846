"""`strata prune`: a checkpoint is written with a report, or activations are counted; bad input is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.cli.main import app


@pytest.mark.parametrize(("pattern", "faster"), [("2:4", "--sparsity 2:4"), ("unstructured", "faster: nothing")])
def test_the_built_in_model_is_pruned_and_what_it_saves_is_said(pattern: str, faster: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["prune", "builtin", "--pattern", pattern, "--method", "magnitude", "--out", str(out)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.strip()}
    assert lines["all"].split()[1:3] == ["35", "50.00%"]
    assert ("35 of 35" in lines["all"]) == (pattern == "2:4")
    assert faster in result.output
    assert (out / "tokenizer.json").is_file()


def test_activations_are_counted_without_an_output() -> None:
    result = CliRunner().invoke(app, ["prune", "builtin", "--count-activations", "--samples", "2", "--length", "20"])
    assert result.exit_code == 0, result.output
    assert "inputs of down projections, 40 tokens" in result.output
    assert "counted, not used" in result.output


def test_what_cannot_be_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    for asked, said in (
        ([], "--out is missing"),
        ([*out, "--pattern", "1:4"], "accepted are '2:4'"),
        ([*out, "--count-activations"], "leave out one of them"),
        ([*out, "--share", "0.4"], "2:4 makes half"),
    ):
        result = CliRunner().invoke(app, ["prune", "builtin", *asked])
        assert isinstance(result.exception, ValueError)
        assert said in str(result.exception)
    assert not list(tmp_path.iterdir())
