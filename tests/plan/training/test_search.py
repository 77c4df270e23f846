"""The plan of a training run: what is chosen, what is refused, and that its file is a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strata.cli.main import app
from strata.cli.train_estimate import model_config
from strata.hardware.specs import device
from strata.models.folder import folder_shape_or_file
from strata.plan.meta_model import find_config
from strata.plan.training.candidates import candidates
from strata.plan.training.plan import TrainingPlan, seconds_by_cause, training_plan
from strata.plan.training.search import search
from strata.plan.training.task import TrainingTask
from strata.train.config import read_train_config
from strata.train.layout import with_micro_batches
from strata.train.predict.estimate import memory, step_shape
from strata.train.predict.min_time import predicted_time

EIGHT = TrainingTask(find_config("8B"), device("h200"), 8, 8 * 16384, 8192)


@pytest.fixture(scope="module")
def planned() -> TrainingPlan:
    return training_plan("8B", EIGHT, price=3.0)


def test_the_best_is_the_quickest_of_all_that_fit(planned: TrainingPlan) -> None:
    """By looking at every candidate, without the bound that leaves most of them out."""
    small = replace(EIGHT, gpus=2, batch_tokens=4 * 8192)
    found = search(small)
    network = small.reach()
    quickest = min(
        predicted_time(shape, recompute, small.device, network).seconds
        for shape in candidates(small)
        for recompute in shape.recomputes
        if memory(shape, recompute).total <= found.usable
    )
    assert found.best.likely.seconds == pytest.approx(quickest)
    assert found.best.fullest.total <= found.usable
    assert all(one.likely.seconds >= planned.best.likely.seconds for one in planned.found.others)


def test_eight_gpus_divide_documents_as_was_measured_to_be_quickest(planned: TrainingPlan) -> None:
    layout = planned.best.shape.layout
    assert (layout.shard, layout.zero, layout.tp, layout.pp) == (8, 2, 1, 1)
    assert planned.best.shape.tokens * planned.best.shape.batches * 8 == EIGHT.batch_tokens


def test_its_file_is_a_run_of_that_step(planned: TrainingPlan, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(planned.run_file())
    run = read_train_config(path)
    assert run.parallel is not None
    layout = with_micro_batches(run.parallel, run.data.packs_per_step)
    config = model_config(run)
    layout.check(config, EIGHT.gpus)
    shape, best = step_shape(run, config, layout), planned.best.shape
    assert (shape.tokens, shape.batches, shape.layout) == (best.tokens, best.batches, best.layout)
    assert run.run.recompute == planned.best.recompute
    assert replace(config, dtype=None, bos_id=None, eos_ids=(), pad_id=None) == replace(
        EIGHT.config, dtype=None, bos_id=None, eos_ids=(), pad_id=None
    )


def test_parts_are_the_step_and_the_price_is_that_of_device_hours(planned: TrainingPlan) -> None:
    time = planned.best.likely
    assert sum(seconds_by_cause(time).values()) == pytest.approx(time.seconds)
    steps = 10**9 / EIGHT.batch_tokens
    assert planned.price_of_tokens(10**9) == pytest.approx(steps * time.seconds / 3600 * 8 * 3.0)
    assert planned.binding.startswith("products and attention (")


def test_a_step_of_a_few_milliseconds_has_three_digits() -> None:
    found = training_plan(
        "builtin", TrainingTask(find_config(folder_shape_or_file("builtin")), device("h200"), 1, 8192, 1024)
    )
    told, time = dict(found.lines()), found.best.likely
    assert time.seconds < 0.01
    assert told["step"] == f"{time.seconds * 1e3:.3g} ms (analytic), at least {found.best.time.seconds * 1e3:.3g}"
    parts = [float(part.split()[-1]) for part in told["ms of it"].split(",")]
    assert sum(parts) == pytest.approx(time.seconds * 1e3, rel=0.01)


def test_a_pipeline_is_a_run_too(tmp_path: Path) -> None:
    """Between hosts of one device a slow network leaves little but stages."""
    task = TrainingTask(find_config("8B"), device("h100"), 4, 16 * 8192, 8192, per_host=1, network=1e9)
    plan = training_plan("8B", task)
    layout = plan.best.shape.layout
    assert layout.pp == 4
    assert plan.command[:5] == ["torchrun", "--nnodes", "4", "--nproc-per-node", "1"]
    path = tmp_path / "run.toml"
    path.write_text(plan.run_file())
    run = read_train_config(path)
    assert run.parallel is not None
    assert with_micro_batches(run.parallel, run.data.packs_per_step) == layout


def test_a_device_without_kernels_is_marked(planned: TrainingPlan) -> None:
    plan = training_plan("1B", TrainingTask(find_config("1B"), device("tpu-v5p"), 1, 8192, 8192))
    assert ("not in Strata", "it has no kernels for TPU v5p; a step would take this") in plan.lines()
    assert (plan.to_dict()["runs"], planned.to_dict()["runs"]) == (False, True)


def test_memory_that_binds_is_told_with_what_it_costs() -> None:
    plan = training_plan("1B", TrainingTask(find_config("1B"), device("rtx5090"), 1, 8192, 8192))
    assert plan.best.recompute != "none"
    assert "and memory: one device, recompute none, " in plan.binding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 10000}, "not a whole number of sequences of 8192; give 8192, or"),
        ({"sequence": 262144, "batch_tokens": 262144}, "longer than the 131072 that the model reads"),
        ({"gpus": 12}, "12 devices do not fill hosts of 8"),
        ({"precision": "fp4"}, "precision 'fp4' is unknown; known are bf16, fp8-tensor, fp8-row"),
        ({"device": device("a100"), "precision": "fp8-row"}, "no compute in float8 is recorded for a100"),
        ({"gpus": 0}, "gpus = 0 must be at least 1"),
    ],
)
def test_tasks_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(EIGHT, **changes)  # type: ignore[arg-type]


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ValueError, match=r"no layout of 1 x NVIDIA H200 fits: the smallest step needs .* too few"):
        search(replace(EIGHT, gpus=1))
    with pytest.raises(ValueError, match="3 sequences of 1024 tokens cannot be shared out equally among 7 devices"):
        search(replace(EIGHT, gpus=7, batch_tokens=3 * 1024, sequence=1024))


def test_the_command_prints_the_plan_and_writes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "planned.toml"
    given = ["plan", "1B", "--train", "--batch-tokens", "16384", "--out", str(path)]
    told = CliRunner().invoke(app, given)
    assert told.exit_code == 0, told.output
    assert f"strata train {path}" in told.output
    assert "MFU" in told.output
    assert read_train_config(path).data.tokens_per_pack == 16384
    again = CliRunner().invoke(app, given)
    assert isinstance(again.exception, ValueError)
    assert "exists; give --out another name" in str(again.exception)
    for wrong in (["--train"], ["--batch-tokens", "8192"], ["--train", "--batch-tokens", "8192", "--input-len", "5"]):
        refused = CliRunner().invoke(app, ["plan", "1B", *wrong])
        assert isinstance(refused.exception, ValueError)
