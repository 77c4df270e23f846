"""The batches of a step on a rank: from any place of the data on, and of every sample once; and how far a run is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from strata.models.config import ModelConfig
from strata.text.tokenizer import Tokenizer
from strata.train.data.mixture import DatasetReader, Mixture
from strata.train.data.pack import PackedBatch, Samples, best_fit, pack
from strata.train.data.shards import TokenDataset
from strata.train.data.tokenize import tokenizer_digest

# Raised whenever the same seed, data and settings give other packs: a run is resumed only in the order it began in.
ORDER = 2


@dataclass(frozen=True)
class DataPosition:
    """How far in the data a run is: packs of the window before `pack` are done, and all windows before `window`."""

    window: int = 0
    pack: int = 0


@dataclass(frozen=True)
class LoadedStep:
    """What one rank trains on in one step.

    batches: the packs of this rank. next: the place of the step after. tokens: in the packs of all ranks; utilisation:
    the share of the room there that they fill.
    """

    batches: list[PackedBatch]
    next: DataPosition
    tokens: int
    utilisation: float


@dataclass(frozen=True)
class Position:
    """step: steps done. data_step: steps of data that these used or left out. place: where in the data the next one
    begins. tokens: trained on, over all ranks.
    """

    step: int = 0
    data_step: int = 0
    place: DataPosition = DataPosition()
    tokens: int = 0

    def after(self, step: LoadedStep) -> Position:
        """The position once this step is done."""
        return Position(self.step + 1, self.data_step + 1, step.next, self.tokens + step.tokens)

    def without(self, step: LoadedStep) -> Position:
        """The position once this step's samples are left out."""
        return Position(self.step, self.data_step + 1, step.next, self.tokens)


class Loader:
    """Packs of at most `capacity` tokens, `packs` of them a step over all ranks; this rank takes every ranks-th one.

    A window of consecutive positions is packed by itself (best fit), so what a pack holds depends on seed, window and
    capacity alone: on any number of ranks, and resumed at any step, a step has the same samples in the same packs.
    """

    def __init__(
        self,
        mixture: Mixture,
        capacity: int,
        packs: int,
        window: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        by_epoch: bool = False,
    ) -> None:
        """by_epoch: no window reaches from one epoch into the next, so that a run of whole epochs has each sample as
        often as any other.

        Raises ValueError if `ranks` does not divide `packs`, or if a sample may be longer than a pack.
        """
        if packs % ranks:
            raise ValueError(
                f"packs_per_step = {packs} is not divisible by the {ranks} data-parallel ranks; "
                f"set data.packs_per_step to a multiple of {ranks}"
            )
        check_capacity(mixture.datasets, capacity)
        self.mixture = mixture
        self._capacity, self._packs, self._window, self._rank, self._ranks = capacity, packs, window, rank, ranks
        self._epoch = mixture.epoch if by_epoch else None
        self._held: tuple[int, list[Samples]] | None = None

    def steps_of(self, epochs: float) -> int:
        """How many steps so many epochs are, of a loader that goes by them. Each sample is packed for it, a microsecond
        each. The last step is filled up from the epoch after.
        """
        assert self._epoch is not None
        positions = max(1, round(epochs * self._epoch))
        packs, window = 0, 0
        while positions > 0:
            there, made = len(self._positions(window)), len(self._packs_of(window))
            packs += ceil(made * min(1.0, positions / there))
            positions -= there
            window += 1
        return -(-packs // self._packs)

    def step(self, place: DataPosition) -> LoadedStep:
        """The step that begins at `place`, as this rank has it."""
        chosen: list[Samples] = []
        window, first = place.window, place.pack
        while len(chosen) < self._packs:
            packs = self._packs_of(window)
            taken = packs[first : first + self._packs - len(chosen)]
            chosen += taken
            first += len(taken)
            if first == len(packs):
                window, first = window + 1, 0
        tokens = sum(pack.tokens for pack in chosen)
        batches = [collate(self.mixture, one) for one in chosen[self._rank :: self._ranks]]
        return LoadedStep(batches, DataPosition(window, first), tokens, tokens / (self._capacity * self._packs))

    def _packs_of(self, window: int) -> list[Samples]:
        """The packs of a window. The window used last is remembered."""
        if self._held is None or self._held[0] != window:
            positions = self._positions(window)
            located = self.mixture.locate(positions)
            self._held = (window, packs_of(self.mixture, positions, *located, self._capacity))
        return self._held[1]

    def _positions(self, window: int) -> NDArray[np.int64]:
        if self._epoch is None:
            return np.arange(window * self._window, (window + 1) * self._window)
        epoch, place = divmod(window, -(-self._epoch // self._window))
        first, end = epoch * self._epoch, (epoch + 1) * self._epoch
        return np.arange(first + place * self._window, min(first + (place + 1) * self._window, end))


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
        made: list[Samples] = []
        for source in sources:
            numbers = np.arange(reader.datasets[source].samples)
            for one in np.split(numbers, range(window, len(numbers), window)):
                made += packs_of(reader, one, np.full_like(one, source), one, capacity)
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


def packs_of(
    reader: DatasetReader,
    positions: NDArray[np.int64],
    sources: NDArray[np.int64],
    numbers: NDArray[np.int64],
    capacity: int,
) -> list[Samples]:
    """The samples numbers[i] of dataset sources[i] in packs of at most `capacity` tokens."""
    lengths = reader.lengths(sources, numbers)
    packs = best_fit(lengths, capacity)
    return [Samples(positions[one], sources[one], numbers[one], int(lengths[one].sum())) for one in packs]


def collate(reader: DatasetReader, samples: Samples) -> PackedBatch:
    """The documents of the samples, one after another, as the model reads them: none sees another."""
    return pack(reader.documents(samples.datasets, samples.numbers), samples)


def check_capacity(datasets: Sequence[TokenDataset], capacity: int) -> None:
    """Raises ValueError if a sample may be longer than a pack of `capacity` tokens."""
    for dataset in datasets:
        if dataset.longest > capacity:
            raise ValueError(
                f"{dataset.folder} has a sample of {dataset.longest} tokens, but a pack has room for {capacity}; "
                f"raise data.tokens_per_pack, or tokenize with a smaller --longest"
            )


def check_data(datasets: Sequence[TokenDataset], kind: str, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises ValueError if a dataset is of another kind or tokenizer than asked, or has what the model cannot read."""
    for dataset in datasets:
        index = dataset.index
        if index.kind != kind:
            raise ValueError(f"{dataset.folder} holds data of the kind {index.kind!r}; this run needs {kind!r}")
        if index.vocab_size > config.vocab_size:
            raise ValueError(
                f"{dataset.folder} was tokenized with a vocabulary of {index.vocab_size}, but the model has "
                f"{config.vocab_size}; tokenize it with the model's tokenizer"
            )
        if index.tokenizer != tokenizer_digest(tokenizer):
            raise ValueError(f"{dataset.folder} was tokenized with another tokenizer than the model's; do it again")
        if dataset.longest_document > config.longest:
            raise ValueError(
                f"{dataset.folder} has a document of {dataset.longest_document} tokens, but the model reads at most "
                f"{config.longest} (max_position_embeddings); tokenize with --longest {config.longest}"
            )


@contextmanager
def prefetch(loader: Loader, place: DataPosition, steps: int, most: int = 4) -> Iterator[Iterator[LoadedStep]]:
    """The `steps` steps from `place` on, up to `most` of them prepared before they are asked for.

    An error of the loader is raised where its step is asked for. On leaving, whether all steps were taken or not, the
    thread has ended.
    """
    made: queue.SimpleQueue[LoadedStep | BaseException] = queue.SimpleQueue()
    room = threading.Semaphore(most)
    left = threading.Event()

    def prepare() -> None:
        at = place
        try:
            for _ in range(steps):
                room.acquire()
                if left.is_set():
                    return
                step = loader.step(at)
                made.put(step)
                at = step.next
        except BaseException as error:
            made.put(error)

    def taken() -> Iterator[LoadedStep]:
        for _ in range(steps):
            item = made.get()
            if isinstance(item, BaseException):
                raise item
            room.release()
            yield item

    thread = threading.Thread(target=prepare, name="data", daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        left.set()
        room.release()
        thread.join()
