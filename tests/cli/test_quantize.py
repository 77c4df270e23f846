"""`strata quantize` and `prune`: a checkpoint is written, and bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from strata.cli.main import app
from strata.models.folder import BUILTIN_FOLDER
from strata.models.quantized.calibrate.unfinished import UnfinishedFolder
from strata.text.tokenizer import Tokenizer
from strata.train.data.calibration import exercise_samples, file_samples


def test_the_built_in_model_is_written_with_its_tokenizer(tmp_path: Path) -> None:
    out = tmp_path / ("in a folder with a name that is longer than a line of the terminal " * 2) / "[bold]fp8"
    out.parent.mkdir()
    result = CliRunner().invoke(app, ["quantize", "builtin", "--out", str(out), "--skip", "*.layers.0.*"])
    assert result.exit_code == 0, result.output
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "float-quantized"
    assert sorted({name.rpartition(".")[2] for name in config["ignore"]}) == [
        "down_proj", "gate_proj", "k_proj", "lm_head", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    assert (out / "tokenizer.json").read_bytes() == (BUILTIN_FOLDER / "tokenizer.json").read_bytes()
    assert f"{out}: fp8 by rtn, 0 tokens" in result.output


@pytest.mark.parametrize(("asked", "columns"), [([], 64), (["--group", "32"], 32), (["--skip", "*.down_proj"], 128)])
def test_groups_of_columns_divide_the_model(asked: list[str], columns: int, tmp_path: Path) -> None:
    """The built-in model's are 256, and 704 of down projections, which 128 do not divide."""
    words = ["quantize", "builtin", "--out", str(tmp_path / "out"), "--scheme", "int4", "--method", "rtn", *asked]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [one["weights"]["group_size"] for one in config["config_groups"].values()] == [columns]
    assert ("groups have 64 columns" in result.output) == (columns == 64)


def test_calibration_text_is_read_in_samples(tmp_path: Path) -> None:
    text, chats, empty = tmp_path / "one.txt", tmp_path / "chats.jsonl", tmp_path / "none.txt"
    text.write_text("What is 3 + 4? " * 40)
    chat = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "Answer: 7"}]
    chats.write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"text": "A story. " * 50}) + "\n")
    empty.write_text("")
    blank = tmp_path / "blank.jsonl"
    blank.write_text(json.dumps({"text": " \n"}) + "\n" + json.dumps({"text": "A story."}) + "\n")
    with Tokenizer.load(BUILTIN_FOLDER) as tokenizer:
        whole = tokenizer.encode(text.read_text())
        samples = file_samples(text, tokenizer, 100, 32)
        assert [token for one in samples for token in one][: len(whole)] == whole
        assert {len(one) for one in samples[:-1]} == {32}
        assert len(file_samples(text, tokenizer, 3, 32)) == 3
        own, story = file_samples(chats, tokenizer, 100, 32)
        assert own == tokenizer.encode_chat(chat, add_generation_prompt=False)[:32]
        assert len(story) == 32
        assert all(0 < len(one) <= 64 for one in exercise_samples(tokenizer, 5, 64))
        (own,) = file_samples(blank, tokenizer, 100, 32)
        assert tokenizer.decode(own).startswith("A story.")
        with pytest.raises(ValueError, match="empty"):
            file_samples(empty, tokenizer, 3, 32)
        blank.write_text(json.dumps({"text": ""}) + "\n")
        with pytest.raises(ValueError, match="holds no text"):
            file_samples(blank, tokenizer, 3, 32)


@pytest.mark.parametrize("shards", [0, 2])
def test_an_interruption_says_what_is_kept(shards: int, tmp_path: Path) -> None:
    out, add, written = tmp_path / "fp8", UnfinishedFolder.add, []

    def add_until(self: UnfinishedFolder, *given: Any) -> None:
        if len(written) == shards:
            raise KeyboardInterrupt
        written.append(add(self, *given))

    with mock.patch.object(UnfinishedFolder, "add", add_until):
        result = CliRunner().invoke(app, ["quantize", "builtin", "--out", str(out)])
    assert result.exit_code == 130
    kept = tmp_path / ".fp8.unfinished"
    said = f"{kept} keeps the shards that are there; the same command goes on" if shards else "nothing is kept"
    assert said in result.output
    assert kept.exists() == bool(shards)


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
