"""Direct preference optimization (Rafailov et al. 2023): chosen replies become likelier than rejected ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from strata.comm.collectives import start_all_reduce
from strata.comm.mesh import Axis
from strata.parallel.loss import Head, MicroBatch
from strata.train.checks import positive
from strata.train.data.loader import OnceLoader
from strata.train.data.mixture import DatasetReader
from strata.train.data.pack import PackedBatch, Samples
from strata.train.steps.objective import Columns


@dataclass(frozen=True)
class DpoConfig:
    """beta: how much a change of log-probability counts. label_smoothing: share of pairs that are the wrong way round
    (conservative DPO, Mitchell 2023)."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        positive("dpo", self, "beta")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"dpo.label_smoothing = {self.label_smoothing} must lie in [0, 0.5)")


def dpo_loss(policy: Tensor, reference: Tensor, config: DpoConfig) -> tuple[Tensor, Tensor]:
    """Loss of each pair and its margin, by how much its chosen reply has gained on the rejected one, [pairs] each.

    policy, reference: [pairs, 2] log-probabilities of the chosen and the rejected reply.
    """
    gains = config.beta * (policy - reference)
    margins = gains[:, 0] - gains[:, 1]
    wrong = config.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins), margins


class Reference:
    """Log-probabilities of all pairs under the model that training began with: computed once, by a step of any layout
    that has not changed it yet.
    """

    def __init__(self) -> None:
        """Of no pairs yet."""
        self._tables: list[Tensor] = []

    def of(self, samples: Samples) -> Tensor:
        """[samples, 2] float32 on the CPU: chosen, rejected."""
        places = samples.datasets.tolist(), samples.numbers.tolist()
        return torch.stack([self._tables[dataset][number] for dataset, number in zip(*places, strict=True)])

    def compute(
        self,
        logprobs: Callable[[Sequence[PackedBatch]], list[Tensor]],
        loader: OnceLoader,
        reader: DatasetReader,
        cache: Path,
        base: str,
        documents: Axis,
        ranks: Axis,
    ) -> None:
        """Take those in the file `cache`, or if it was made with other data or another model, new ones, left there.

        logprobs: of a step, see `ParallelStep`. loader: of all pairs of `reader`, this rank's part along `documents`.
        base: what tells the model from others (see `weights_digest`). ranks: all, which call this alike and meet after
        every step's packs, so that none waits for longer than these take.
        """
        made_of = {"base": base, "data": " ".join(dataset.fingerprint for dataset in reader.datasets)}
        stored = _stored(cache, made_of, len(reader.datasets))
        if start_all_reduce(torch.tensor(stored is not None, dtype=torch.int32), ranks, "min").wait():
            assert stored is not None
            self._tables = stored
            return
        tables = [torch.zeros(dataset.samples, 2) for dataset in reader.datasets]
        for batches in loader:
            for packed, each in zip(batches, logprobs(batches), strict=True):
                if (samples := packed.samples) is not None:
                    homes = torch.from_numpy(packed.homes)
                    pairs = torch.zeros(len(packed.lengths), dtype=each.dtype).index_add(0, homes, each).view(-1, 2)
                    for dataset, number, pair in zip(samples.datasets, samples.numbers, pairs, strict=True):
                        tables[dataset][number] = pair
            # A collective fails if others are awaited for too long.
            start_all_reduce(torch.zeros(()), ranks).wait()
        # What the others have computed is added to zeros: the bits are theirs.
        self._tables = [start_all_reduce(table, documents).wait() for table in tables]
        if ranks.index == 0:
            part = cache.with_name(f".{cache.name}.part")
            save_file({str(number): table for number, table in enumerate(self._tables)}, part, metadata=made_of)
            part.replace(cache)


def _stored(cache: Path, made_of: Mapping[str, str], datasets: int) -> list[Tensor] | None:
    """The tables of a file, if it is there and made of the same."""
    if not cache.exists():
        return None
    with safe_open(cache, framework="pt") as file:
        return [file.get_tensor(str(number)) for number in range(datasets)] if file.metadata() == made_of else None


def weights_digest(folder: Path) -> str:
    """A checksum of the weights in a model folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


class DpoObjective:
    """The DPO loss of the pairs of a pack; for the log how many pairs have a positive margin, and the margins."""

    metrics: tuple[str, ...] = ("preferred", "margin")
    sums_cross_entropy: bool = False

    def __init__(self, reference: Reference, config: DpoConfig) -> None:
        self._reference, self._config = reference, config

    def count(self, packed: PackedBatch) -> int:
        return 0 if packed.samples is None else len(packed.lengths) // 2

    def columns(self, packed: PackedBatch) -> Columns:
        known = np.zeros(0, np.float32)
        if packed.samples is not None:
            known = self._reference.of(packed.samples).flatten().numpy()
        return Columns(documents={"reference": known})

    def __call__(self, hidden: Tensor, head: Head, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        reference = batch.columns["reference"]
        # A pack that fills up a step has a document, and no pair.
        policy = batch.per_document(-head.cross_entropy(hidden, batch.targets))[: len(reference)]
        losses, margins = dpo_loss(policy.view(-1, 2), reference.view(-1, 2), self._config)
        found = {"preferred": (margins > 0).to(margins.dtype), "margin": margins}
        return batch.mean_of_documents(losses), {name: batch.mean_of_documents(one) for name, one in found.items()}
