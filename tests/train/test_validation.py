"""What a run is measured by: held-out samples, each once, the lowest loss, when to stop; times of steps; rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import get_scheduler

from strata.files.toml_tables import read_table
from strata.models.config import config_from_dict
from strata.parallel.layout import Layout
from strata.train.config import TrainConfig, ValidationConfig
from strata.train.data.loader import DataPosition, Loader, OnceLoader
from strata.train.data.mixture import DatasetReader, Mixture
from strata.train.data.shards import TokenDataset
from strata.train.faults import stragglers
from strata.train.log import step_times
from strata.train.log.description import DESCRIPTION, RunDescription, read_description
from strata.train.log.step_times import TIMES, TrainingStepTimes, open_times
from strata.train.optimizer.config import learning_rate
from strata.train.phases import NO_PHASES
from strata.train.predict.flops import document_flops
from strata.train.validation import Validation, ValidationProgress
from tests.train.conftest import SMALL
from tests.train.samples import sample
from tests.train.test_meter import Time, step_of


def documents(dataset: TokenDataset) -> list[bytes]:
    return [sample(dataset, number)[0].tokens.tobytes() for number in range(dataset.samples)]


def test_a_share_is_held_out_whole_and_nothing_of_it_is_left(exercises: Path) -> None:
    whole = TokenDataset(exercises)
    kept, held_out = whole.divided(0.1)
    assert held_out.samples == round(0.1 * whole.samples)
    assert kept.samples + held_out.samples == whole.samples
    assert kept.tokens + held_out.tokens == whole.tokens
    assert sorted(documents(kept) + documents(held_out)) == sorted(documents(whole))
    again = TokenDataset(exercises).divided(0.1)
    assert documents(again[1]) == documents(held_out)
    prints = {one.fingerprint for one in (whole, kept, held_out, *whole.divided(0.2))}
    assert len(prints) == 5, "a run is not resumed with another share"
    # Not the end or the beginning of the data, which is often of one kind.
    places = np.flatnonzero([one in set(documents(held_out)) for one in documents(whole)])
    assert places[0] < whole.samples / 4 < whole.samples * 3 / 4 < places[-1]


def test_a_share_leaves_something_to_train_on(exercises: Path) -> None:
    whole = TokenDataset(exercises)
    assert whole.divided(1e-6)[1].samples == 1
    with pytest.raises(ValueError, match=r"of which a share of 0\.9999 leaves none to train on"):
        whole.divided(0.9999)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_sample_counts_once_over_all_ranks(exercises: Path, ranks: int) -> None:
    kept, held_out = TokenDataset(exercises).divided(0.2)
    reader = DatasetReader([kept, held_out])
    loaders = [OnceLoader(reader, [1], 500, 4, 16, rank=rank, ranks=ranks) for rank in range(ranks)]
    steps = list(zip(*loaders, strict=True))
    counted, seen = 0, []
    for step in steps:
        assert {len(batches) for batches in step} == {4 // ranks}
        for batches in step:
            for packed in batches:
                counted += len(packed.targets)
                assert len(packed.tokens) <= 500
                if packed.samples is None:
                    assert not len(packed.targets)
                    continue
                assert set(packed.samples.datasets) == {1}
                seen += packed.samples.numbers.tolist()
    assert sorted(seen) == list(range(held_out.samples))
    assert counted == sum(sample(held_out, number)[0].loss_mask.sum() for number in range(held_out.samples))


def test_epochs_hold_every_sample_as_often(exercises: Path) -> None:
    dataset = TokenDataset(exercises)

    def numbers(epochs: float) -> list[int]:
        loader = Loader(Mixture([dataset], [1.0], 5), 500, 2, 64, by_epoch=True)
        place, found = DataPosition(), []
        for _ in range(steps_of(epochs)):
            step = loader.step(place)
            found += [packed.samples.numbers.tolist() for packed in step.batches if packed.samples is not None]
            place = step.next
        return [number for pack in found for number in pack]

    def steps_of(epochs: float) -> int:
        return Loader(Mixture([dataset], [1.0], 5), 500, 2, 64, by_epoch=True).steps_of(epochs)

    for epochs in (1, 2):
        counts = np.bincount(numbers(epochs), minlength=dataset.samples)
        assert counts.min() >= epochs
        # The last step is filled up, with less than one pack here, from the epoch after.
        assert counts.sum() < epochs * dataset.samples + dataset.samples / 20
    half = numbers(0.5)
    assert len(half) == pytest.approx(dataset.samples / 2, rel=0.1)
    assert steps_of(0.5) < steps_of(1) < steps_of(1.5) < steps_of(3)


def test_an_epoch_of_several_sources_has_as_many_tokens_as_they_hold(exercises: Path) -> None:
    parts = TokenDataset(exercises).divided(0.25)
    epoch = Mixture([*parts], [3.0, 1.0], 0).epoch
    assert epoch == pytest.approx(300, rel=0.02)
    # Of the small one alone there would be four times as many.
    mixture = Mixture([*parts], [1.0, 1.0], 0)
    sources, numbers = mixture.locate(np.arange(mixture.epoch))
    assert mixture.lengths(sources, numbers).sum() == pytest.approx(sum(one.tokens for one in parts), rel=0.05)


def progress(losses: list[float], min_delta: float = 0.0) -> list[ValidationProgress]:
    found, now = [], ValidationProgress()
    for step, loss in enumerate(losses, 1):
        now = now.after(10 * step, loss, min_delta)
        found.append(now)
    return found


def test_patience_counts_evaluations_since_a_loss_that_was_lower() -> None:
    found = progress([3.0, 2.0, 2.5, 2.0, 1.5, float("nan"), 1.6])
    assert [one.waited for one in found] == [0, 0, 1, 2, 0, 1, 2]
    assert [one.step for one in found] == [10, 20, 20, 20, 50, 50, 50]
    assert found[-1].lowest == 1.5


def test_min_delta_is_what_all_together_must_gain() -> None:
    """Small gains add up, as in Keras and Lightning; the lowest is the lowest all the same."""
    found = progress([2.0, 1.96, 1.93, 1.89, 1.88], min_delta=0.1)
    assert [one.waited for one in found] == [0, 1, 2, 0, 1]
    assert (found[-1].lowest, found[-1].step, found[-1].reference) == (1.88, 50, 1.89)


def test_what_was_found_survives_a_checkpoint_and_other_data_begins_anew(exercises: Path) -> None:
    kept, held_out = TokenDataset(exercises).divided(0.1)
    config = ValidationConfig(share=0.1, patience=2)

    def validation(dataset: TokenDataset) -> Validation:
        return Validation(config, OnceLoader(DatasetReader([dataset]), [0], 600, 1, 64), NO_PHASES)

    first = validation(held_out)
    for losses in ([], [2.0, 1.0, 1.5], [1.0, float("inf"), 1.1]):
        first.progress = (progress(losses) or [ValidationProgress()])[-1]
        second = validation(held_out)
        assert second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        assert (second.progress, second.stops) == (first.progress, first.stops)
    assert second.stops
    other = validation(kept)
    assert not other.restore(first.state())
    assert other.progress == ValidationProgress()
    assert other.restore(None), "a checkpoint of a run without validation"


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


@pytest.mark.parametrize(
    ("peak", "steps", "options", "wanted"),
    [
        (1.0, 10, {"warmup": 4, "decay": 5}, [0.25, 0.5, 0.75, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        (3.0, 3, {"warmup": 0, "decay": 0}, [3.0, 3.0, 3.0]),
        # What falls ends at a share of the peak, a step after the last; not the warm-up, which begins at 0.
        (2.0, 6, {"warmup": 2, "decay": 2, "min_lr_factor": 0.5}, [1.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0]),
        (2.0, 6, {"warmup": 2, "name": "linear", "min_lr_factor": 0.5}, [1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0]),
        # Nothing but warm-up.
        (1.0, 2, {"warmup": 2, "name": "cosine"}, [0.5, 1.0]),
        (1.0, 2, {"warmup": 2, "name": "linear"}, [0.5, 1.0]),
    ],
)
def test_rates_by_hand(peak: float, steps: int, options: dict[str, Any], wanted: list[float]) -> None:
    found = [learning_rate(step, peak=peak, steps=steps, **options) for step in range(len(wanted))]
    assert found == pytest.approx(wanted)


def test_longer_stable_phase_leaves_the_beginning_alone() -> None:
    short = [learning_rate(step, peak=1.0, steps=20, warmup=3, decay=5) for step in range(15)]
    assert short == [learning_rate(step, peak=1.0, steps=40, warmup=3, decay=5) for step in range(15)]


@pytest.mark.parametrize(
    ("name", "options", "theirs", "theirs_options"),
    [
        ("cosine", {}, "cosine", {}),
        ("cosine", {"min_lr_factor": 0.1}, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("linear", {}, "linear", {}),
        ("constant", {}, "constant_with_warmup", {}),
        ("warmup_stable_decay", {"decay": 5}, "warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "linear"}),
    ],
)
def test_schedules_are_those_of_transformers(
    name: str, options: dict[str, Any], theirs: str, theirs_options: dict[str, Any]
) -> None:
    """Whose warm-up begins with a rate of 0: it is a step behind."""
    steps, warmup = 20, 4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    scheduler = get_scheduler(theirs, optimizer, warmup, steps, theirs_options)
    wanted = []
    for _ in range(steps):
        wanted.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    found = [learning_rate(step, peak=3e-4, steps=steps, warmup=warmup, name=name, **options) for step in range(steps)]
    assert found[: warmup - 1] == pytest.approx(wanted[1:warmup])
    assert found[warmup - 1 :] == pytest.approx([3e-4, *wanted[warmup:]])
