"""Every sample of some datasets once, in steps as a run's layout takes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from strata.train.data.loader import check_capacity, collate
from strata.train.data.mixture import DatasetReader
from strata.train.data.pack import PackedBatch, Samples
from strata.train.data.packing import best_fit


class OnceLoader:
    """Packs of at most `capacity` tokens, `packs` of them a step over all ranks; this rank takes every ranks-th one.

    What a pack holds does not depend on the ranks. The last step is filled with packs of which the loss counts nothing,
    so that every rank has as many as in any other step.

    fingerprints: of the datasets.
    """

    def __init__(
        self,
        reader: DatasetReader,
        sources: Sequence[int],
        capacity: int,
        packs: int,
        window: int,
        *,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """sources: which of the reader's datasets. window: samples that are packed together. Raises ValueError if a
        sample may be longer than a pack.
        """
        check_capacity([reader.datasets[source] for source in sources], capacity)
        self.fingerprints = [reader.datasets[source].fingerprint for source in sources]
        self._reader, self._packs, self._rank, self._ranks = reader, packs, rank, ranks
        made = [one for source in sources for one in _packed(reader, source, capacity, window)]
        self._steps = [made[first : first + packs] for first in range(0, len(made), packs)]

    def __iter__(self) -> Iterator[list[PackedBatch]]:
        for step in self._steps:
            batches = [collate(self._reader, one) for one in step[self._rank :: self._ranks]]
            missing = self._packs // self._ranks - len(batches)
            yield batches + [uncounted(collate(self._reader, step[0]))] * missing


def uncounted(packed: PackedBatch) -> PackedBatch:
    """The longest document of a pack, and no token of it in the loss."""
    longest = int(packed.lengths.argmax())
    first, end = packed.offsets[longest], packed.offsets[longest + 1]
    none = np.zeros(0, np.int64)
    return PackedBatch(
        packed.tokens[first:end], packed.positions[first:end], np.array([0, end - first], np.int32), none, none
    )


def _packed(reader: DatasetReader, source: int, capacity: int, window: int) -> Iterator[Samples]:
    dataset = reader.datasets[source]
    for first in range(0, dataset.samples, window):
        numbers = np.arange(first, min(first + window, dataset.samples))
        lengths = dataset.lengths(numbers)
        for one in best_fit(lengths, capacity):
            yield Samples(numbers[one], np.full_like(one, source), numbers[one], int(lengths[one].sum()))
