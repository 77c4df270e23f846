"""What a run is measured by: which samples are held out, that each counts once, the lowest loss, and when to stop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from strata.train.config import ValidationConfig
from strata.train.data.loader import DataPosition, Loader
from strata.train.data.mixture import DatasetReader, Mixture
from strata.train.data.once import OnceLoader
from strata.train.data.shards import TokenDataset
from strata.train.phases import NO_PHASES
from strata.train.validation import Validation, ValidationProgress


def documents(dataset: TokenDataset) -> list[bytes]:
    return [dataset.sample(number)[0].tokens.tobytes() for number in range(dataset.samples)]


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
    assert counted == sum(held_out.sample(number)[0].loss_mask.sum() for number in range(held_out.samples))


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
