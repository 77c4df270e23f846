"""Times of an interval by hand, and what a run says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from strata.files.toml_tables import read_table
from strata.models.config import config_from_dict
from strata.parallel.layout import Layout
from strata.train.config import TrainConfig
from strata.train.faults import stragglers
from strata.train.log import step_times
from strata.train.log.description import DESCRIPTION, RunDescription, read_description
from strata.train.log.step_times import TIMES, TrainingStepTimes, open_times
from strata.train.predict.flops import document_flops
from tests.train.conftest import SMALL
from tests.train.test_meter import Time, step_of

MODEL = config_from_dict(SMALL["model"] | {"vocab_size": 600}, "model")


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    for module in (step_times, stragglers):
        monkeypatch.setattr(module, "time", made)
    return made


def test_phases_add_up_to_the_interval_and_work_is_counted(time: Time) -> None:
    times = TrainingStepTimes(MODEL, 2, torch.device("cpu"))
    time.now += 50  # before the first step
    times.restart()
    for lengths in ((30, 70), (100,)):
        for phase, seconds in (("data", 0.5), ("passes", 2.0), ("update", 0.25), ("log", 0.125)):
            times.at(phase)
            if phase == "passes":
                times.begin()
            time.now += seconds
            if phase == "update":
                times.end(step_of(*lengths, utilisation=1.0))
    values = times.take()
    assert values["phases"] == {"data": 1.0, "passes": 4.0, "update": 0.5, "log": 0.25}
    assert values["seconds"] == pytest.approx(5.75)
    assert values["device"] == pytest.approx(4.5)
    assert (values["steps"], values["tokens"], values["sequences"], values["packs"]) == (2, 200, 6, 4)
    wanted = document_flops(MODEL, [30, 70], 98) + document_flops(MODEL, [100], 99)
    assert [values[name] for name in ("products", "attention", "head")] == [
        2 * wanted.products,
        2 * wanted.attention,
        2 * wanted.head,
    ]
    # The next interval knows nothing of it, and goes on in the phase that was under way.
    time.now += 1
    times.at("checkpoint")
    time.now += 3
    values = times.take()
    assert values["phases"] == {"log": 1.0, "checkpoint": 3.0}
    assert (values["steps"], values["device"], values["products"], values["seconds"]) == (0, 0, 0, 4.0)


def test_a_resumed_run_drops_the_times_of_steps_that_it_repeats(tmp_path: Path) -> None:
    for first in (0, 10):
        with open_times(tmp_path, first, rank=0, warn=pytest.fail) as sink:
            for step in (first + 10, first + 20):
                sink.write(step, {"begun": first})
    lines = [json.loads(line) for line in (tmp_path / TIMES).read_text().splitlines()]
    assert [(line["step"], line["begun"]) for line in lines] == [(10, 0), (20, 10), (30, 10)]
    with open_times(tmp_path / "other", 0, rank=1, warn=pytest.fail) as sink:
        sink.write(1, {})
    assert not (tmp_path / "other").exists()


def described(folder: Path) -> RunDescription:
    table = SMALL | {"start": {"tokenizer": "builtin"}, "data": SMALL["data"] | {"sources": [{"folder": "text"}]}}
    table = table | {"run": SMALL["run"] | {"out": str(folder)}}
    layout = Layout(pp=2, shard=2, zero=2, micro_batches=4)
    return RunDescription(read_table(TrainConfig, table), MODEL, layout, "mlp", "NVIDIA H200", "cuda", 8)


def test_a_description_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = described(tmp_path)
    made.write(tmp_path)
    assert read_description(tmp_path) == made


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("more", 1, "'more' is unknown"), ("layout", {"tp": "2"}, "tp"), ("config", {}, "'run' is missing")],
)
def test_other_files_are_refused_with_their_name(key: str, value: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run\.json"):
        read_description(tmp_path)
    described(tmp_path).write(tmp_path)
    path = tmp_path / DESCRIPTION
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=named) as raised:
        read_description(tmp_path)
    assert str(path) in str(raised.value)
