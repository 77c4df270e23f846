"""Which samples a step has, whatever the ranks and wherever the run was stopped; and that they are read ahead."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.models.config import config_from_dict
from strata.text.tokenizer import Tokenizer
from strata.train.data.loader import DataPosition, LoadedStep, Loader, check_data, prefetch
from strata.train.data.mixture import BLOCK, Mixture
from strata.train.data.pack import best_fit
from strata.train.data.permutation import mixed, permuted
from strata.train.data.shards import TokenDataset
from strata.train.data.tokenize import tokenize
from tests.train.conftest import SMALL
from tests.train.samples import sample, write_lines

WORDS = ["quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "and", "packs", "five", "dozen", "jugs"]


@pytest.fixture(scope="module")
def datasets(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TokenDataset]:
    """Two of texts of 1 to 15 words, 90 and 40 samples, in shards of a few samples."""
    made = []
    for seed, count in ((0, 90), (1, 40)):
        draw = np.random.default_rng(seed)
        out = tmp_path_factory.mktemp("data")
        lines = [{"text": " ".join(draw.choice(WORDS, draw.integers(1, 16)))} for _ in range(count)]
        write_lines(out / "a.jsonl", lines)
        tokenize([out / "a.jsonl"], folder, out / "shards", bytes_per_shard=700)
        made.append(TokenDataset(out / "shards"))
    return made


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 5000), key=st.integers(0, 2**40))
def test_permutation_is_one(count: int, key: int) -> None:
    images = permuted(np.arange(count), count, mixed(key))
    assert np.array_equal(np.sort(images), np.arange(count))


def test_permutation_is_random_enough() -> None:
    """Mean displacement of n/3, about one fixed point, no correlation between neighbours or between keys."""
    count = 20_000
    one, other = (permuted(np.arange(count), count, mixed(7, epoch)) for epoch in (0, 1))
    assert abs(np.abs(one - np.arange(count)).mean() / count - 1 / 3) < 0.01
    assert (one == np.arange(count)).sum() < 8
    assert abs(np.corrcoef(one[1:], one[:-1])[0, 1]) < 0.03
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03


def test_an_epoch_has_every_sample_once(datasets: list[TokenDataset]) -> None:
    mixture = Mixture(datasets[:1], [1.0], seed=5)
    epochs = [mixture.locate(np.arange(90 * epoch, 90 * (epoch + 1)))[1].tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(90)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert Mixture(datasets[:1], [1.0], seed=6).locate(np.arange(90))[1].tolist() != epochs[0]


def test_weights_are_shares_of_tokens(datasets: list[TokenDataset]) -> None:
    mixture = Mixture(datasets, [3.0, 1.0], seed=5)
    positions = np.arange(3 * BLOCK)
    sources, numbers = mixture.locate(positions)
    lengths = mixture.lengths(sources, numbers)
    assert lengths[sources == 0].sum() / lengths.sum() == pytest.approx(0.75, abs=0.005)
    for source, dataset in enumerate(datasets):
        seen = Counter(numbers[sources == source].tolist())
        assert set(seen) == set(range(dataset.samples))
        assert max(seen.values()) - min(seen.values()) <= 1
    # Any positions, asked for in any order, are the same.
    asked = np.random.default_rng(0).permutation(positions)[:500]
    assert np.array_equal(mixture.locate(asked)[1], numbers[asked])


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_packing_cuts_nothing_and_leaves_no_two_packs_that_fit_one(lengths: list[int]) -> None:
    packs = best_fit(lengths, 50)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in pack) <= 50 for pack in packs)
    # A pack is begun only for what fits no other, so no two packs could be one.
    filled = sorted(sum(lengths[index] for index in pack) for pack in packs)
    assert len(packs) == 1 or filled[0] + filled[1] > 50
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)


def best_fit_one_by_one(lengths: list[int], capacity: int) -> list[list[int]]:
    """The same, looking at all packs each time: the fullest with room, of those the one begun first, or a new one."""
    packs: list[list[int]] = []
    long = [index for index in range(len(lengths)) if lengths[index] > capacity // 4]
    short = [index for index in range(len(lengths)) if index not in long]
    for index in sorted(long, key=lambda index: -lengths[index]) + short:
        room = [capacity - sum(lengths[other] for other in pack) for pack in packs]
        fitting = [at for at in range(len(packs)) if room[at] >= lengths[index]]
        if fitting:
            packs[min(fitting, key=lambda at: room[at])].append(index)
        else:
            packs.append([index])
    return sorted(map(sorted, packs))


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), max_size=120), capacity=st.integers(12, 90))
def test_packing_is_best_fit(lengths: list[int], capacity: int) -> None:
    packs = best_fit(lengths, capacity)
    assert [pack.tolist() for pack in packs] == best_fit_one_by_one(lengths, capacity)


def test_short_documents_share_a_pack_whatever_their_lengths() -> None:
    """Else a pack, and with it a step, has documents of one kind."""
    lengths = np.random.default_rng(0).geometric(0.02, 20_000).clip(2, 500)
    packs = best_fit(lengths, 8192)
    means = [lengths[pack].mean() for pack in packs[:-1]]
    assert np.std(means) < 1.5 * lengths.std() / np.sqrt(len(lengths) / len(packs))
    assert lengths.sum() > 0.98 * 8192 * len(packs)


def test_a_sample_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="a sample of 13 tokens does not fit a pack of 12"):
        best_fit([3, 13], 12)


def steps(
    datasets: list[TokenDataset],
    count: int,
    rank: int,
    ranks: int,
    place: DataPosition = DataPosition(),  # noqa: B008
) -> list[LoadedStep]:
    loader = Loader(Mixture(datasets, [1.0, 1.0], seed=2), 64, 8, 50, rank=rank, ranks=ranks)
    made = []
    for _ in range(count):
        made.append(loader.step(place))
        place = made[-1].next
    return made


def ids(step: LoadedStep) -> list[list[tuple[int, int, int]]]:
    """What is in each pack."""
    samples = [batch.samples for batch in step.batches if batch.samples is not None]
    return [list(zip(*map(list, (one.positions, one.datasets, one.numbers)), strict=True)) for one in samples]


def test_ranks_and_resuming_do_not_change_what_a_step_has(datasets: list[TokenDataset]) -> None:
    alone = steps(datasets, 12, 0, 1)
    for ranks in (2, 4):
        per_rank = [steps(datasets, 12, rank, ranks) for rank in range(ranks)]
        for number, whole in enumerate(alone):
            parts = [per_rank[rank][number] for rank in range(ranks)]
            assert all(part.next == whole.next for part in parts)
            assert all(part.utilisation == whole.utilisation for part in parts)
            interleaved = [pack for packs in zip(*(ids(part) for part in parts), strict=True) for pack in packs]
            assert interleaved == ids(whole)
    # Stopped anywhere and continued on another number of ranks, from nothing but the place.
    for stopped in range(1, 12):
        for ranks, rank in ((1, 0), (2, 1), (4, 2)):
            resumed = steps(datasets, 12 - stopped, rank, ranks, alone[stopped - 1].next)
            for step, whole in zip(resumed, alone[stopped:], strict=True):
                assert ids(step) == ids(whole)[rank::ranks]
                for batch, expected in zip(step.batches, whole.batches[rank::ranks], strict=True):
                    assert np.array_equal(batch.tokens, expected.tokens)
    # Together the windows leave out no position and have none twice.
    seen = sorted(position for step in alone for pack in ids(step) for position, _, _ in pack)
    done = alone[-1].next.window * 50
    assert seen[:done] == list(range(done))
    assert len(set(seen)) == len(seen)
    assert np.mean([step.utilisation for step in alone]) > 0.9


def test_a_batch_is_its_documents_apart(datasets: list[TokenDataset]) -> None:
    (step,) = steps(datasets, 1, 0, 1)
    for batch, samples in zip(step.batches, ids(step), strict=True):
        documents = [sample(datasets[dataset], number)[0] for _, dataset, number in samples]
        assert len(batch.tokens) <= 64
        assert batch.lengths.tolist() == [len(document.tokens) for document in documents]
        assert batch.positions.tolist() == [at for document in documents for at in range(len(document.tokens))]
        assert batch.targets.tolist() == [id for document in documents for id in document.tokens[1:]]
        assert np.array_equal(batch.tokens[batch.rows + 1], batch.targets)
        # No row predicts the first token of the document after it.
        assert not np.isin(batch.rows + 1, batch.offsets).any()


def test_data_that_does_not_fit_is_refused_before_training(
    datasets: list[TokenDataset], folder: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    mixture = Mixture(datasets, [1.0, 1.0], 0)
    with pytest.raises(ValueError, match=r"by the 3 data-parallel ranks; set data\.packs_per_step to a multiple of 3"):
        Loader(mixture, 64, 8, 50, ranks=3)
    with pytest.raises(ValueError, match=r"a sample of \d+ tokens, but a pack has room for 16"):
        Loader(mixture, 16, 8, 50)
    with pytest.raises(ValueError, match=r"weight = 0\.0 of .* must be positive"):
        Mixture(datasets, [1.0, 0.0], 0)
    with pytest.raises(ValueError, match="is too small"):
        Mixture(datasets, [1.0, 1e-9], 0)
    with Tokenizer.load(folder) as own, Tokenizer.load(tokenizer_folder) as other:
        config = config_from_dict(SMALL["model"] | {"vocab_size": own.vocab_size}, "model")
        check_data(datasets, "text", config, own)
        with pytest.raises(ValueError, match="holds data of the kind 'text'; this run needs 'chat'"):
            check_data(datasets, "chat", config, own)
        with pytest.raises(ValueError, match="with another tokenizer than the model's"):
            check_data(datasets, "text", config, other)
        smaller = config_from_dict(SMALL["model"] | {"vocab_size": 100}, "model")
        with pytest.raises(ValueError, match=r"with a vocabulary of \d+, but the model has 100"):
            check_data(datasets, "text", smaller, own)
        short = SMALL["model"] | {"vocab_size": own.vocab_size, "max_position_embeddings": 8}
        with pytest.raises(ValueError, match=r"a document of \d+ tokens, but the model reads at most 8"):
            check_data(datasets, "text", config_from_dict(short, "model"), own)


class Counted(Loader):
    """Step n ends at window n + 1; `asked` counts them; the step of window `bad` is an error."""

    def __init__(self, bad: int | None = None) -> None:
        self.asked, self.bad = 0, bad

    def step(self, place: DataPosition) -> LoadedStep:
        self.asked += 1
        if place.window == self.bad:
            raise OSError("the disk is gone")
        return LoadedStep([], DataPosition(place.window + 1), 0, 1.0)


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "data"]


def settled(loader: Counted, least: int) -> int:
    """How many steps have been asked for once so many have come and no more do."""
    deadline = time.monotonic() + 60
    while loader.asked < least and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    return loader.asked


def test_all_steps_in_order() -> None:
    with prefetch(Counted(), DataPosition(7), 20) as steps:
        assert [step.next.window for step in steps] == list(range(8, 28))
    assert not threads()


def test_it_runs_as_far_ahead_as_asked_and_no_further() -> None:
    loader = Counted()
    with prefetch(loader, DataPosition(), 100, most=3) as steps:
        assert settled(loader, 3) == 3
        next(steps)
        next(steps)
        assert settled(loader, 5) == 5
    assert not threads()


def test_an_error_comes_where_its_step_would() -> None:
    with prefetch(Counted(bad=2), DataPosition(), 9) as steps:
        assert [next(steps).next.window for _ in range(2)] == [1, 2]
        with pytest.raises(OSError, match="the disk is gone"):
            next(steps)
    assert not threads()


def test_leaving_early_ends_the_thread() -> None:
    with prefetch(Counted(), DataPosition(), 9) as steps:
        next(steps)
    assert not threads()
    with prefetch(Counted(), DataPosition(), 0) as steps:
        assert list(steps) == []
    assert not threads()
