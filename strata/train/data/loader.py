"""The batches of a step on a rank, from any place of the data on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.models.config import ModelConfig
from strata.models.tokenizer import Tokenizer
from strata.train.data.mixture import Mixture
from strata.train.data.packing import best_fit
from strata.train.data.shards import TokenDataset
from strata.train.data.tokenize import tokenizer_digest
from strata.train.encode import Encoded
from strata.train.pack import PackedBatch, pack


@dataclass(frozen=True)
class Place:
    """How far in the data a run is: packs of the window before `pack` are done, and all windows before `window`."""

    window: int = 0
    pack: int = 0


@dataclass(frozen=True)
class SampleId:
    """Which sample, and at which position of the mixture it stands."""

    position: int
    dataset: int
    number: int


@dataclass(frozen=True)
class Step:
    """What one rank trains on in one step.

    batches: a packed batch for each pack of this rank. samples: what is in each. next: the place of the step after.
    utilisation: share of the room in the packs of all ranks that holds tokens.
    """

    batches: list[PackedBatch]
    samples: list[list[SampleId]]
    next: Place
    utilisation: float


class Loader:
    """Packs of at most `capacity` tokens, `packs` of them a step over all ranks; this rank takes every ranks-th one.

    A window of consecutive positions is packed by itself (best fit), so what a pack holds depends on seed, window and
    capacity alone: on any number of ranks, and resumed at any step, a step has the same samples in the same packs.
    """

    def __init__(
        self, mixture: Mixture, capacity: int, packs: int, window: int, *, rank: int = 0, ranks: int = 1
    ) -> None:
        """Raises ValueError if `ranks` does not divide `packs`, or if a sample may be longer than a pack."""
        if packs % ranks:
            raise ValueError(f"packs_per_step = {packs} is not divisible by the {ranks} data-parallel ranks")
        for dataset in mixture.datasets:
            if dataset.longest > capacity:
                raise ValueError(
                    f"{dataset.folder} has a sample of {dataset.longest} tokens, but a pack has room for {capacity}; "
                    f"raise data.tokens_per_pack, or tokenize with a smaller --longest"
                )
        self.mixture = mixture
        self._capacity, self._packs, self._window, self._rank, self._ranks = capacity, packs, window, rank, ranks
        self._held: tuple[int, list[list[int]]] | None = None

    def step(self, place: Place) -> Step:
        """The step that begins at `place`, as this rank has it."""
        chosen: list[list[int]] = []
        window, first = place.window, place.pack
        while len(chosen) < self._packs:
            packs = self._packs_of(window)
            taken = packs[first : first + self._packs - len(chosen)]
            chosen += taken
            first += len(taken)
            if first == len(packs):
                window, first = window + 1, 0
        filled = int(self.mixture.lengths(np.array([position for one in chosen for position in one])).sum())
        samples = [self._ids(positions) for positions in chosen[self._rank :: self._ranks]]
        batches = [collate(self.mixture, one) for one in samples]
        return Step(batches, samples, Place(window, first), filled / (self._capacity * self._packs))

    def _packs_of(self, window: int) -> list[list[int]]:
        """The positions in each pack of a window. The window used last is remembered."""
        if self._held is None or self._held[0] != window:
            positions = np.arange(window * self._window, (window + 1) * self._window)
            packs = best_fit(self.mixture.lengths(positions).tolist(), self._capacity)
            self._held = (window, [[int(positions[index]) for index in one] for one in packs])
        return self._held[1]

    def _ids(self, positions: list[int]) -> list[SampleId]:
        sources, numbers = self.mixture.locate(np.array(positions))
        return [SampleId(*one) for one in zip(positions, sources.tolist(), numbers.tolist(), strict=True)]


def collate(mixture: Mixture, samples: Sequence[SampleId]) -> PackedBatch:
    """The documents of the samples, one after another, as the model reads them: none sees another."""
    documents = [document for one in samples for document in mixture.datasets[one.dataset].sample(one.number)]
    offsets = np.cumsum([0, *(len(document.tokens) for document in documents)])
    tokens = np.concatenate([document.tokens for document in documents])
    wanted = np.concatenate([document.wanted for document in documents])
    return pack([Encoded(tokens, wanted, offsets)], samples[-1].position + 1)


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
        if dataset.longest_document > config.max_length:
            raise ValueError(
                f"{dataset.folder} has a document of {dataset.longest_document} tokens, but the model reads at most "
                f"{config.max_length} (max_position_embeddings); tokenize with --longest {config.max_length}"
            )
