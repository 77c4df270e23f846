"""Whole runs on the CPU: resuming, checkpoints, errors, the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from strata.cli.train import train
from strata.models.weights import load
from strata.train import loop
from strata.train.checkpoint import checkpoints
from strata.train.config import TrainConfig, read_train_config, train_config_from_dict
from strata.train.loop import Run

Small = Callable[..., TrainConfig]


def log(folder: Path) -> list[dict[str, Any]]:
    """The log without what is measured."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line.keys() - {"seconds", "tokens_per_second"}} for line in lines]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_resumed_run_repeats_every_bit(small: Small, tmp_path: Path) -> None:
    through = Run(small(run={"out": str(tmp_path / "through"), "keep_checkpoints": 9}))
    through.train()

    # The same run, cut off after step 4: step 4 is in the log, but the latest checkpoint is of step 3.
    class CutOff(Exception):
        pass

    def stop(progress: loop.Progress) -> None:
        if progress.step == 4:
            raise CutOff

    cut = small(run={"out": str(tmp_path / "cut")})
    with pytest.raises(CutOff):
        Run(cut).train(stop)
    assert [line["step"] for line in log(tmp_path / "cut")] == [1, 2, 3, 4]
    resumed = Run(cut, resume=True)
    assert resumed.position.step == 3
    resumed.train()
    assert log(tmp_path / "cut") == log(tmp_path / "through")
    assert resumed.position == through.position
    for file in ("model.safetensors", "optimizer.safetensors"):
        one = load_file(tmp_path / "through/checkpoints/step-00000006" / file)
        other = load_file(tmp_path / "cut/checkpoints/step-00000006" / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file
    assert not torch.are_deterministic_algorithms_enabled()


def test_checkpoint_is_a_model_folder(small: Small, tmp_path: Path) -> None:
    run = Run(small())
    model = run.train().model
    kept = checkpoints(tmp_path / "run/checkpoints")
    assert [path.name for path in kept] == ["step-00000003", "step-00000006"]
    stored, config = load(kept[-1])
    assert config == run.model_config or config.dtype == torch.float32
    for name, parameter in stored.named_parameters():
        assert torch.equal(parameter, run.model.get_parameter(name))
    final, final_config = load(model)
    assert final_config.dtype == torch.bfloat16
    for name, parameter in final.named_parameters():
        assert torch.equal(parameter, run.model.get_parameter(name).to(torch.bfloat16))
    files = {path.suffix for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert files <= {".safetensors", ".json", ".jsonl", ".jinja"}


def test_half_written_and_corrupt_checkpoints(small: Small, tmp_path: Path) -> None:
    config = small()
    Run(config).train()
    folder = tmp_path / "run/checkpoints"
    # What a crash while writing leaves behind is no checkpoint.
    (folder / ".step-00000009.part").mkdir()
    assert Run(config, resume=True).position.step == 6
    (folder / "step-00000006/optimizer.safetensors").write_bytes(b"\x10")
    with pytest.raises(ValueError, match="step-00000006 is corrupt"):
        Run(config, resume=True)


def test_a_run_is_not_overwritten_nor_resumed_with_another_recipe(small: Small) -> None:
    Run(small()).train()
    with pytest.raises(ValueError, match="holds a run"):
        Run(small())
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate was 0\.005 and is now 0\.001"):
        Run(small(optimizer={"learning_rate": 1e-3}), resume=True)
    longer = Run(small(run={"steps": 7}), resume=True)
    longer.train()
    assert longer.position.step == 7


def test_a_loss_that_is_not_finite_stops_the_run(small: Small, tmp_path: Path) -> None:
    run = Run(small(run={"log_every": 1}))
    with torch.no_grad():
        run.model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(FloatingPointError, match="at step 1: not finite"):
        run.train()
    assert not checkpoints(tmp_path / "run/checkpoints")


def test_same_seed_same_run_other_seed_another(small: Small, tmp_path: Path) -> None:
    losses = []
    for number, seed in enumerate((3, 3, 4)):
        out = str(tmp_path / str(number))
        Run(small(run={"out": out, "seed": seed, "steps": 4})).train()
        losses.append([line["loss"] for line in log(Path(out))])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("run", {"stepz": 3}, r"run: unknown key 'stepz'"),
        ("run", {"steps": "6"}, r"run: steps must be of type int, got '6'"),
        ("run", {"steps": True}, r"run: steps must be of type int, got True"),
        ("run", {"precision": "fp4"}, r"run\.precision = 'fp4' must be one of bf16, fp8-tensor, fp8-row"),
        ("run", {"steps": 0}, r"run\.steps = 0 must be positive"),
        ("run", {"log_every": 2}, r"checkpoint_every = 3 must be a multiple"),
        ("schedule", {"warmup": 5}, r"exceeds run\.steps = 6"),
        ("schedule", {"warmup": -1}, r"must not be negative"),
        ("optimizer", {"learning_rate": float("nan")}, r"learning_rate = nan must be positive"),
        ("optimizer", {"beta2": 1.0}, r"beta2 = 1.0 must lie in"),
        ("tokenizer", {"vocab_size": 70_000}, r"vocab_size = 70000 must lie in"),
        ("speed", {"fast": True}, r"unknown key 'speed'"),
    ],
)
def test_wrong_configs_are_refused(small: Small, section: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**{section: changes})


def test_eight_bits_need_a_gpu(small: Small) -> None:
    with pytest.raises(ValueError, match=r"'fp8-row' needs a GPU .* use 'bf16' on this cpu"):
        Run(small(run={"precision": "fp8-row"}))


def test_missing_section_and_missing_file(small_table: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'data' is missing"):
        train_config_from_dict({key: value for key, value in small_table.items() if key != "data"}, "test")
    with pytest.raises(ValueError, match=r"none\.toml does not exist"):
        read_train_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("run = [")
    with pytest.raises(ValueError, match="cannot be read as TOML"):
        read_train_config(tmp_path / "bad.toml")


def test_model_section_is_read_strictly(small: Small) -> None:
    with pytest.raises(ValueError, match="hiden_size"):
        Run(small(model={"hiden_size": 3}))
    with pytest.raises(ValueError, match="vocab_size follows from the tokenizer"):
        Run(small(model={"vocab_size": 3}))


def test_the_shipped_recipe_is_valid() -> None:
    recipe = read_train_config(Path(__file__).parents[2] / "examples/builtin.toml")
    assert recipe.evaluate is not None
    assert recipe.export is not None


def test_command_trains_evaluates_and_exports(small_table: dict[str, Any], tmp_path: Path) -> None:
    sections = small_table
    sections["run"] |= {"out": str(tmp_path / "run")}
    sections["evaluate"] = {"examples": 1, "max_tokens": 4}
    sections["export"] = {"folder": str(tmp_path / "exported")}
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path = tmp_path / "run.toml"
    path.write_text("\n".join(lines))
    app = typer.Typer()
    app.command()(train)
    result = CliRunner().invoke(app, [str(path), "--steps", "4"])
    assert result.exit_code == 0, result.output
    accuracy = json.loads((tmp_path / "exported/accuracy.json").read_text())
    assert accuracy["two-digit addition"]["total"] == 1
    card = (tmp_path / "exported/MODEL_CARD.md").read_text()
    assert "no general assistant" in card
    assert re.search(r"\| two-digit addition \| [01] \| 1 \|", card)
    load(tmp_path / "exported")
    assert [line["step"] for line in log(tmp_path / "run")] == [1, 2, 3, 4]
