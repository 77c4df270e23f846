"""Several datasets as one: by dataset and number of a sample, and as one endless sequence by seed and position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.train.data.encoding import Encoded
from strata.train.data.permutation import mixed, permuted
from strata.train.data.shards import TokenDataset, documents_per_sample

# Positions over which the share of every dataset is exact.
BLOCK = 4096


class DatasetReader:
    """The documents of several datasets' samples, which are known by dataset and number."""

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        self.datasets = list(datasets)

    def lengths(self, sources: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens of each of the samples numbers[i] of dataset sources[i], [n]."""
        lengths = np.empty_like(numbers)
        for source in np.unique(sources):
            chosen = sources == source
            lengths[chosen] = self.datasets[source].lengths(numbers[chosen])
        return lengths

    def documents(self, sources: NDArray[np.int64], numbers: NDArray[np.int64]) -> Encoded:
        """The documents of the samples numbers[i] of dataset sources[i], one after another; tokens in int32."""
        each = documents_per_sample(self.datasets[0].index.kind)
        present = [(self.datasets[source], sources == source) for source in np.unique(sources)]
        spans = [dataset.spans(numbers[chosen]) for dataset, chosen in present]
        lengths = np.empty((len(numbers), each), np.int64)
        for (_, chosen), found in zip(present, spans, strict=True):
            lengths[chosen] = found.lengths.reshape(-1, each)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        made = Encoded(np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.bool_), offsets)
        starts = offsets[:-1].reshape(-1, each)
        for (dataset, chosen), found in zip(present, spans, strict=True):
            dataset.copy(found, made, starts[chosen].reshape(-1))
        return made


class Mixture(DatasetReader):
    """Samples of `datasets`, each dataset in a new random order in every epoch of its own.

    Nothing is drawn one after another: neither the number of ranks nor the place where a run was stopped matters.
    """

    def __init__(self, datasets: Sequence[TokenDataset], weights: Sequence[float], seed: int) -> None:
        """weights: shares of the tokens. Raises ValueError for a weight that is not positive or too small to occur."""
        super().__init__(datasets)
        self._seed = seed
        for dataset, weight in zip(datasets, weights, strict=True):
            if not 0 < weight < float("inf"):
                raise ValueError(f"weight = {weight} of {dataset.folder} must be positive and finite")
        shares = np.array(
            [weight * one.samples / one.tokens for one, weight in zip(datasets, weights, strict=True)], np.float64
        )
        self._quotas = _quotas(shares / shares.sum(), BLOCK if len(self.datasets) > 1 else 1)
        if 0 in self._quotas:
            folder = self.datasets[int(np.argmin(self._quotas))].folder
            raise ValueError(f"the weight of {folder} is too small: fewer than one of {BLOCK} samples")
        self._ends = np.cumsum(self._quotas)

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Dataset and number of the sample at each of `positions` [n], [n] and [n].

        A block of positions, shuffled, has a fixed number of places for each dataset; the k-th place of a dataset in
        all blocks is sample k mod its size in the order of epoch k div its size.
        """
        size = int(self._ends[-1])
        blocks, places = np.divmod(positions, size)
        slots = permuted(places, size, mixed(self._seed, -1, blocks))
        sources = np.searchsorted(self._ends, slots, side="right")
        counts = blocks * self._quotas[sources] + slots - (self._ends - self._quotas)[sources]
        numbers = np.empty_like(positions)
        for source in np.unique(sources):
            chosen = sources == source
            epochs, turns = np.divmod(counts[chosen], self.datasets[source].samples)
            numbers[chosen] = permuted(turns, self.datasets[source].samples, mixed(self._seed, int(source), epochs))
        return sources, numbers

    @property
    def epoch(self) -> int:
        """Positions in which as many tokens stand as the datasets hold: of one dataset, each of its samples once."""
        if len(self.datasets) == 1:
            return self.datasets[0].samples
        each = [one.tokens / one.samples for one in self.datasets]
        block = float(self._quotas @ each)
        return max(1, round(sum(one.tokens for one in self.datasets) * int(self._ends[-1]) / block))


def _quotas(shares: NDArray[np.float64], block: int) -> NDArray[np.int64]:
    """`block` places by `shares`, whole numbers by the largest remainder."""
    exact = shares * block
    quotas = np.floor(exact).astype(np.int64)
    order = np.argsort(quotas - exact, kind="stable")
    quotas[order[: block - int(quotas.sum())]] += 1
    return quotas
