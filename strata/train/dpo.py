"""Direct preference optimization (Rafailov et al. 2023): chosen replies become likelier than rejected ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
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
from strata.comm.to_device import to_device
from strata.kernels.loss.loss import linear_cross_entropy
from strata.models.layers import CausalLM
from strata.train.data.loader import collate
from strata.train.data.mixture import DatasetReader
from strata.train.data.pack import PackedBatch, Samples, move
from strata.train.steps.passes import head_weight


@dataclass(frozen=True)
class DpoConfig:
    """beta: how much a change of log-probability counts. label_smoothing: share of pairs that are the wrong way round
    (conservative DPO, Mitchell 2023)."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"dpo.beta = {self.beta} must be positive and finite")
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


def reply_logprobs(model: CausalLM, packed: PackedBatch) -> Tensor:
    """Log-probability of the tokens that the loss counts of each document of a batch, [documents] float32."""
    head = head_weight(model)
    batch, rows, targets = packed.to(head.device)
    each = -linear_cross_entropy(model(batch).index_select(0, rows), head, targets)
    homes = move(np.searchsorted(packed.offsets, packed.rows, side="right") - 1, head.device)
    return torch.zeros(len(packed.lengths), dtype=each.dtype, device=head.device).index_add(0, homes, each)


class Reference:
    """Log-probabilities of all pairs under the model that training began with, computed once."""

    def __init__(self, tables: list[Tensor]) -> None:
        """tables: of each dataset, [samples, 2] float32: chosen, rejected."""
        self._tables = tables

    def of(self, samples: Samples) -> Tensor:
        """[samples, 2] on the CPU."""
        places = samples.datasets.tolist(), samples.numbers.tolist()
        return torch.stack([self._tables[dataset][number] for dataset, number in zip(*places, strict=True)])

    @classmethod
    def computed(
        cls,
        make_model: Callable[[], CausalLM],
        reader: DatasetReader,
        capacity: int,
        cache: Path,
        base: str,
        ranks: Axis,
    ) -> Reference:
        """Those in the file `cache`, or if it was made with other data or another model, new ones, left there.

        make_model: called if it is needed, for the model as the run will compute with it. base: what tells the model
        from others (see `weights_digest`). capacity: tokens that a batch may have. ranks: the axis of all, which call
        this alike and compute a share each; the numbers do not depend on how many there are.
        """
        made_of = {"base": base, "data": " ".join(dataset.fingerprint for dataset in reader.datasets)}
        stored = _stored(cache, made_of, len(reader.datasets))
        if start_all_reduce(torch.tensor(stored is not None, dtype=torch.int32), ranks, "min").wait():
            assert stored is not None
            return cls(stored)
        model = make_model()
        tables = [_logprobs(model, reader, number, capacity, ranks) for number in range(len(reader.datasets))]
        if ranks.index == 0:
            part = cache.with_name(f".{cache.name}.part")
            save_file({str(number): table for number, table in enumerate(tables)}, part, metadata=made_of)
            part.replace(cache)
        return cls(tables)


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

    def __init__(self, reference: Reference, config: DpoConfig) -> None:
        self._reference, self._config = reference, config

    def count(self, packed: PackedBatch) -> int:
        return len(packed.lengths) // 2

    def __call__(self, model: CausalLM, packed: PackedBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        policy = reply_logprobs(model, packed).view(-1, 2)
        assert packed.samples is not None, "pairs are known by their dataset and number"
        losses, margins = dpo_loss(policy, to_device(self._reference.of(packed.samples), policy.device), self._config)
        return losses.sum(), {"preferred": (margins > 0).to(margins.dtype).sum(), "margin": margins.sum()}


@torch.no_grad()
def _logprobs(model: CausalLM, reader: DatasetReader, dataset: int, capacity: int, ranks: Axis) -> Tensor:
    """Of all samples of a dataset, [samples, 2] float32 on the CPU, from batches that the ranks take in turns.

    They meet after each, so that none waits for longer than a batch takes: a collective fails if it waits too long.
    """
    parts, runs = [], list(_in_order(reader, dataset, capacity))
    for first in range(0, len(runs), ranks.size):
        batches = runs[first : first + ranks.size]
        tables = [torch.zeros(len(one.numbers), 2) for one in batches]
        if ranks.index < len(batches):
            packed = collate(reader, batches[ranks.index])
            tables[ranks.index].copy_(reply_logprobs(model, packed).view(-1, 2))
        # What the others have computed is added to zeros: the bits are theirs.
        parts.append(start_all_reduce(torch.cat(tables), ranks).wait())
    return torch.cat(parts)


def _in_order(reader: DatasetReader, dataset: int, capacity: int) -> Iterator[Samples]:
    """All samples of a dataset in runs of at most `capacity` tokens."""
    lengths = reader.datasets[dataset].lengths(np.arange(reader.datasets[dataset].samples))
    first, tokens = 0, 0
    for number, length in enumerate(lengths.tolist()):
        if number > first and tokens + length > capacity:
            yield _run(dataset, first, number, tokens)
            first, tokens = number, 0
        tokens += length
    yield _run(dataset, first, len(lengths), tokens)


def _run(dataset: int, first: int, end: int, tokens: int) -> Samples:
    numbers = np.arange(first, end)
    return Samples(numbers, np.full_like(numbers, dataset), numbers, tokens)
