"""The file of a run: what it may say, what is refused in which words, values of the command line in its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata.files.toml_tables import read_table, replaced
from strata.parallel.layout import Layout
from strata.train.config import TrainConfig, read_train_config
from tests.train.conftest import Small, Tune

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("run", {"stepz": 3}, r"run: unknown key 'stepz'; known are out, steps, epochs, seed"),
        ("run", {"steps": "6"}, r"run: steps must be of type int, got '6'"),
        ("run", {"steps": True}, r"run: steps must be of type int, got True"),
        ("run", {"steps": 6.0}, r"run: steps must be of type int, got 6\.0"),
        ("run", {"steps": 0}, r"run\.steps = 0 must be positive"),
        ("run", {"keep_checkpoints": 0}, r"run\.keep_checkpoints = 0 must be positive"),
        ("run", {"precision": "fp4"}, r"run\.precision = 'fp4' must be one of bf16, fp8-tensor, fp8-row"),
        ("run", {"recompute": "all"}, r"run\.recompute = 'all' must be one of auto, none, operations, mlp, layers"),
        ("run", {"deterministic": 1}, r"deterministic must be of type bool, got 1"),
        ("schedule", {"warmup": 5}, r"schedule\.warmup \+ schedule\.decay = 7 exceeds run\.steps = 6"),
        ("schedule", {"warmup": -1}, r"schedule\.warmup = -1 must not be negative"),
        ("schedule", {"name": "wsd"}, r"schedule\.name = 'wsd' must be one of warmup_stable_decay, cosine, linear"),
        ("schedule", {"decay": None}, r"schedule\.decay is missing: the last steps of warmup_stable_decay"),
        ("schedule", {"name": "cosine"}, r"schedule\.decay = 2 is for warmup_stable_decay; remove it for cosine"),
        ("schedule", {"min_lr_factor": 1.5}, r"schedule\.min_lr_factor = 1\.5 must lie in \[0, 1\]"),
        (
            "schedule",
            {"name": "constant", "decay": None, "min_lr_factor": 0.1},
            r"schedule\.min_lr_factor = 0\.1 has no use in a constant rate",
        ),
        ("schedule", {"name": "linear", "decay": None, "warmup": 7}, r"schedule\.warmup = 7 exceeds run\.steps = 6"),
        ("run", {"epochs": 2}, r"run\.steps = 6 and run\.epochs = 2 both say how long; give one"),
        ("run", {"steps": None}, r"run\.steps is missing, and so is run\.epochs; give one of them"),
        ("run", {"steps": None, "epochs": 0.0}, r"run\.epochs = 0\.0 must be positive"),
        ("run", {"steps": None, "epochs": float("inf")}, r"run\.epochs = inf must be positive and finite"),
        ("run", {"seed": 10**20}, r"run\.seed = 10+ must be an integer of 64 bits"),
        ("evaluate", {"examples": 0}, r"evaluate\.examples = 0 must be positive"),
        ("evaluate", {"max_tokens": -3}, r"evaluate\.max_tokens = -3 must be positive"),
        ("run", {"steps": None, "epochs": "all"}, r"run: epochs must be of type float, got 'all'"),
        ("validation", {}, r"\[validation\] needs either a folder of `strata data`, or the share"),
        ("validation", {"share": 0.1, "folder": "x"}, r"\[validation\] needs either a folder"),
        ("validation", {"share": 1}, r"validation\.share = 1\.0 must lie between 0 and 1"),
        ("validation", {"share": 0.1, "every": 0}, r"validation\.every = 0 must be positive"),
        ("validation", {"share": 0.1, "patience": 0}, r"validation\.patience = 0 must be positive"),
        ("validation", {"share": 0.1, "min_delta": 0.1}, r"validation\.min_delta = 0\.1 says what patience waits for"),
        ("validation", {"share": 0.1, "patience": 1, "min_delta": -1}, r"validation\.min_delta = -1\.0 must be 0 or"),
        ("validation", {"share": 0.1, "patients": 3}, r"validation: unknown key 'patients'; known are folder, share"),
        ("data", {"sources": []}, r"data\.sources is empty; name at least one folder"),
        ("data", {"sources": [{"folder": "x", "wight": 1}]}, r"sources\[0\]: unknown key 'wight'"),
        ("data", {"sources": [{"weight": 1}]}, r"sources\[0\]: 'folder' is missing"),
        ("data", {"sources": "x"}, r"sources must be a list, got 'x'"),
        ("data", {"packs_per_step": 0}, r"data\.packs_per_step = 0 must be positive"),
        ("data", {"tokens_per_pack": None}, r"data: 'tokens_per_pack' is missing"),
        ("optimizer", {"name": "sgd"}, r"optimizer\.name = 'sgd' must be one of adamw, muon"),
        ("optimizer", {"clip": float("nan")}, r"optimizer\.clip = nan must be positive"),
        ("optimizer", {"learning_rate": float("nan")}, r"optimizer\.learning_rate = nan must be positive"),
        ("optimizer", {"learning_rate": float("inf")}, r"optimizer\.learning_rate = inf must be positive and finite"),
        ("optimizer", {"weight_decay": -0.1}, r"optimizer\.weight_decay = -0\.1 must not be negative"),
        ("optimizer", {"weight_decay": float("inf")}, r"optimizer\.weight_decay = inf must not be"),
        ("optimizer", {"beta2": 1.0}, r"optimizer\.beta2 = 1\.0 must lie in"),
        ("optimizer", {"momentum": -1}, r"optimizer\.momentum = -1\.0 must lie in"),
        ("parallel", {"tpp": 2}, r"parallel: unknown key 'tpp'; known are pp, dp, shard, cp, tp, ep, zero"),
        ("parallel", {"zero": 4}, r"parallel: zero must be one of 0, 1, 2, 3, got 4"),
        ("parallel", {"context": "star"}, r"parallel: context must be one of ring, ulysses, got 'star'"),
        ("parallel", {"tp": "2"}, r"parallel: tp must be of type int, got '2'"),
        ("faults", {"non_finite": "ignore"}, r"faults\.non_finite = 'ignore' must be one of skip, stop"),
        ("faults", {"spike": "back"}, r"faults\.spike = 'back' must be one of ignore, report, rollback"),
        ("faults", {"spike_window": 3}, r"faults\.spike_window = 3 must be at least 8"),
        ("faults", {"max_skipped": -1}, r"faults\.max_skipped = -1 must be at least 0"),
        ("faults", {"spike_sigma": float("nan")}, r"faults\.spike_sigma = nan must be positive and finite"),
        ("faults", {"hang_seconds": -5}, r"faults\.hang_seconds = -5\.0 must be at least 1, or 0"),
        ("faults", {"hang_seconds": 0.5}, r"faults\.hang_seconds = 0\.5 must be at least 1, or 0"),
        ("log", {"tensorboard": "yes"}, r"log: tensorboard must be of type bool, got 'yes'"),
        ("log", {"wandb_offline": True}, r"log\.wandb_offline says how log\.wandb writes, which is off"),
        ("start", {"tokenizer": None}, r"\[start\] needs either a model, to go on from, or a tokenizer and"),
        ("start", {"model": "builtin"}, r"\[start\] needs either a model, to go on from, or a tokenizer"),
        ("start", {"model": "builtin", "tokenizer": None}, r"a fresh model has a \[model\] table and start\.tokenizer"),
        ("lora", {}, r"\[lora\] and \[dpo\] start from a trained model: remove \[model\], or those"),
        ("dpo", {}, r"\[lora\] and \[dpo\] start from a trained model: remove \[model\], or those"),
        ("export", {"folder": "x"}, r"\[export\] writes a card with accuracies: add \[evaluate\], or remove"),
        ("speed", {"fast": True}, r"unknown key 'speed'"),
        ("tokenizer", {"vocab_size": 600}, r"unknown key 'tokenizer'"),
    ],
)
def test_wrong_configs_are_refused(small: Small, section: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**{section: changes})


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("lora", {"rank": "8"}, r"lora: rank must be of type int, got '8'"),
        ("lora", {"rank": 0}, r"lora\.rank = 0 and lora\.alpha = 16\.0 must be positive"),
        ("lora", {"projections": ["q_proj", 3]}, r"projections\[1\] must be of type str, got 3"),
        ("lora", {"alpha": float("nan")}, r"lora\.rank = 8 and lora\.alpha = nan must be positive"),
        ("dpo", {"beta": 0}, r"dpo\.beta = 0\.0 must be positive"),
        ("dpo", {"beta": float("nan")}, r"dpo\.beta = nan must be positive"),
        ("start", {"model": None, "tokenizer": "builtin"}, r"a fresh model has a \[model\] table and start\.tokenizer"),
    ],
)
def test_wrong_tuning_is_refused(tune: Tune, section: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune("style", **{section: changes})


def test_adapters_beside_products_in_8_bits_are_refused(tune: Tune) -> None:
    with pytest.raises(ValueError, match=r"run\.precision = 'fp8-row' is not for \[lora\]: use 'bf16'"):
        tune("style", run={"precision": "fp8-row"}, lora={})
    assert tune("short", run={"precision": "fp8-row"}, dpo={}).run.precision == "fp8-row"


def test_missing_section_and_missing_file(small_table: dict[str, Any], tmp_path: Path) -> None:
    for name in ("run", "start", "data", "optimizer", "schedule"):
        with pytest.raises(ValueError, match=f"'{name}' is missing"):
            read_table(TrainConfig, {key: value for key, value in small_table.items() if key != name})
    with pytest.raises(ValueError, match=r"data must be a table, got 3"):
        read_table(TrainConfig, small_table | {"data": 3})
    with pytest.raises(ValueError, match=r"none\.toml does not exist"):
        read_train_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[run]\nout = \n", r"line 2, column 7: not TOML: Invalid value"),
        (b"[run]\nsources = [\n\n", r"line 2: not TOML: "),
        (b"# a\n# \xc3\xbc \xe9", r"line 2, column 5: not UTF-8: byte 0xe9"),
    ],
)
def test_what_is_no_toml_is_named_by_line_and_column(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "run.toml").write_bytes(data)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/run\.toml, {message}"):
        read_train_config(tmp_path / "run.toml")


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000], ids=["digits", "depth"])
def test_what_python_cannot_hold_is_no_toml_either(tmp_path: Path, value: str) -> None:
    (tmp_path / "run.toml").write_text(f"[run]\nsteps = {value}")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/run\.toml: not TOML that can be read"):
        read_train_config(tmp_path / "run.toml")


@pytest.mark.parametrize(
    ("old", "new", "changes", "message"),
    [
        ("steps = 60", "stepz = 60", (), r"run\.toml, line {at}: run: unknown key 'stepz'"),
        ("steps = 60", 'steps = "60"', (), r"run\.toml, line {at}: run: steps must be of type int"),
        ("steps = 60", "steps = 0", (), r"run\.toml, line {at}: run\.steps = 0 must be positive"),
        ("steps = 60", "", (), r"run\.toml, line {section}: run\.steps is missing, and so is run\.epochs"),
        ("[run]", "[walk]\nfast = 1\n\n[run]", (), r"run\.toml, line {section}: unknown key 'walk'"),
        ("steps = 60", "steps = 60", (("run.steps", "0"),), r"--run\.steps: run\.steps = 0 must be positive"),
    ],
)
def test_a_wrong_value_is_named_by_its_line(
    tmp_path: Path, old: str, new: str, changes: tuple[tuple[str, str], ...], message: str
) -> None:
    text = (EXAMPLES / "sft.toml").read_text()
    text = re.sub(r"(?m)^steps = \d+", "steps = 60", text)
    lines = text.splitlines()
    places = {"at": lines.index("steps = 60") + 1, "section": lines.index("[run]") + 1}
    (tmp_path / "run.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message.format(**places)):
        read_train_config(tmp_path / "run.toml", changes)


SHIPPED: dict[str, Callable[[TrainConfig], bool]] = {
    "sft": lambda run: run.lora is not None and run.start.model == "builtin",
    "dpo": lambda run: run.dpo is not None and run.lora is None,
    "pretrain": lambda run: run.model is not None and run.start.tokenizer == "builtin",
    "builtin": lambda run: run.evaluate is not None and run.export is not None,
    "1b": lambda run: run.parallel is None and run.model is not None,
    "8b": lambda run: run.parallel == Layout(shard=8, zero=2),
}


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.toml"))])
def test_the_shipped_recipes_are_valid(name: str) -> None:
    run = read_train_config(EXAMPLES / f"{name}.toml")
    assert SHIPPED[name](run)
    assert f"strata train examples/{name}.toml" in (EXAMPLES / f"{name}.toml").read_text()


def changed(*changes: tuple[str, str]) -> TrainConfig:
    return read_train_config(EXAMPLES / "sft.toml", changes)


def test_values_of_every_type_replace_those_of_the_file() -> None:
    run = changed(
        ("run.steps", "50"),
        ("run.out", "runs/other"),  # bare text
        ("run.device", '"cpu"'),
        ("run.deterministic", "false"),
        ("optimizer.learning_rate", "1e-3"),
        ("optimizer.weight_decay", "0"),
        ("optimizer.beta1", ".5"),  # as Python writes it
        ("validation.keep_best", "True"),
        ("data.sources", '[{ folder = "a" }, { folder = "b", weight = 2 }]'),
        ("lora.projections", '["q_proj", "v_proj"]'),
        ("faults.spike", "rollback"),  # a section that the file does not have
        ("schedule.warmup", "6"),
        ("schedule.warmup", "7"),  # the last one counts
    )
    assert (run.run.steps, run.run.out, run.run.device, run.run.deterministic) == (50, "runs/other", "cpu", False)
    assert (run.optimizer.learning_rate, run.optimizer.weight_decay, run.optimizer.beta1) == (1e-3, 0.0, 0.5)
    assert run.validation is not None
    assert run.validation.keep_best is True
    assert [(one.folder, one.weight) for one in run.data.sources] == [("a", 1.0), ("b", 2.0)]
    assert run.lora is not None
    assert (run.lora.projections, run.lora.rank) == (["q_proj", "v_proj"], 8)
    assert (run.faults.spike, run.schedule.warmup, run.schedule.decay) == ("rollback", 7, 20)
    assert changed(("run.out", "with space = and more")).run.out == "with space = and more"


def test_a_length_replaces_that_of_the_file_whichever_way_it_is_said(tmp_path: Path) -> None:
    by_epochs = changed(("run.epochs", "1.5")).run
    assert (by_epochs.steps, by_epochs.epochs) == (None, 1.5)
    text = re.sub(r"(?m)^steps = \d+", "epochs = 3", (EXAMPLES / "sft.toml").read_text())
    (tmp_path / "run.toml").write_text(text)
    assert read_train_config(tmp_path / "run.toml").run.epochs == 3.0
    by_steps = read_train_config(tmp_path / "run.toml", [("run.steps", "7"), ("schedule.decay", "1")]).run
    assert (by_steps.steps, by_steps.epochs) == (7, None)
    with pytest.raises(ValueError, match=r"both say how long"):
        changed(("run.epochs", "1.5"), ("run.steps", "7"))


def test_what_a_run_has_one_of_is_replaced_by_the_other() -> None:
    """A file's value cannot be taken away on the command line, but by what stands in its place."""
    held_out = changed(("validation.folder", "runs/other")).validation
    assert held_out is not None
    assert (held_out.folder, held_out.share, held_out.every) == ("runs/other", None, 10)
    for name in ("cosine", "linear", "constant"):
        schedule = changed(("schedule.name", name)).schedule
        assert (schedule.name, schedule.warmup, schedule.decay) == (name, 5, None)
    assert changed(("schedule.name", "warmup_stable_decay")).schedule.decay == 20
    with pytest.raises(ValueError, match=r"schedule\.decay = 3 is for warmup_stable_decay"):
        changed(("schedule.name", "cosine"), ("schedule.decay", "3"))
    with pytest.raises(ValueError, match=r"needs either a folder of .* or the share"):
        changed(("validation.folder", "runs/other"), ("validation.share", "0.1"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("run.stepz", "3", r"run: unknown key 'stepz'; known are out, steps"),
        ("runs.steps", "3", r"sft\.toml: unknown key 'runs'; known are run, start, data"),
        ("run.steps", "many", r"run: steps must be of type int, got 'many'"),
        ("run.steps", "1e3", r"run: steps must be of type int, got 1000\.0"),
        ("run.out", "5", r"run: out must be of type str, got 5"),
        ("run.steps", "0", r"run\.steps = 0 must be positive"),
        ("data.sources.folder", "x", r"data: unknown key 'sources\.folder'"),
        ("data.sources", '["runs/toy"]', r"^--data\.sources: data: sources\[0\] must be a table, got 'runs/toy'"),
        ("schedule.name", "cosin", r"schedule\.name = 'cosin' must be one of warmup_stable_decay, cosine"),
        ("run.", "3", r"--run\.: write --SECTION\.KEY VALUE, for example --run\.steps 100"),
        (".steps", "3", r"--\.steps: write --SECTION\.KEY VALUE"),
    ],
)
def test_wrong_values_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed((name, value))


def test_what_is_replaced_is_a_copy() -> None:
    document = {"run": {"steps": 3}, "title": "x"}
    assert replaced(document, [("run.steps", "4")]) == {"run": {"steps": 4}, "title": "x"}
    assert document == {"run": {"steps": 3}, "title": "x"}
    with pytest.raises(ValueError, match=r"--title\.a: title is no section"):
        replaced(document, [("title.a", "4")])
