"""How far what one model predicts is from what another does, for every token of passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from strata.bench.accuracy.passages import Passage
from strata.bench.accuracy.states import Predictions

_ROWS = 256  # at once: with a vocabulary of 128,256 ids the log-probabilities of one model take 131 MB

Values = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class Divergence:
    """Of every token that is scored, [tokens] in the order of the passages.

    losses, reference_losses: negative log-probabilities of the token, in nats.
    kl: KL(reference || model) over the whole vocabulary, in nats: how many more the model needs for a token that the
        reference draws.
    agrees: 1 where both find the same token likeliest, else 0.
    """

    losses: Values
    reference_losses: Values
    kl: Values
    agrees: Values


def losses(model: Predictions, passages: Sequence[Passage]) -> Values:
    """The model's negative log-probability of every token that is scored, in nats, [tokens]; ValueError for NaN."""
    parts = [
        -_chosen(model.log_probabilities(number, rows), targets)
        for number, passage in enumerate(passages)
        for rows, targets in _parts(passage)
    ]
    return _values(parts)


def divergence(model: Predictions, reference: Predictions, passages: Sequence[Passage]) -> Divergence:
    """Compare both over all passages; log-probabilities and their sums are float32. Both need the same vocabulary.

    Raises ValueError if either predicts NaN.
    """
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for number, passage in enumerate(passages):
        for rows, targets in _parts(passage):
            ours, theirs = (one.log_probabilities(number, rows) for one in (model, reference))
            # What the reference never says costs nothing, however unlikely the other finds it.
            kl = torch.where(theirs == -torch.inf, 0.0, theirs.exp() * (theirs - ours)).sum(-1)
            agrees = ours.argmax(-1) == theirs.argmax(-1)
            found.append((-_chosen(ours, targets), -_chosen(theirs, targets), kl, agrees))
    return Divergence(*(_values(column) for column in zip(*found, strict=True)))


def _parts(passage: Passage) -> list[tuple[slice, Tensor]]:
    """Rows of its hidden states, and the ids that these predict."""
    targets = torch.tensor(passage.ids[passage.first :])
    return [(slice(start, start + _ROWS), targets[start : start + _ROWS]) for start in range(0, len(targets), _ROWS)]


def _chosen(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    return log_probabilities.gather(1, targets.to(log_probabilities.device)[:, None])[:, 0]


def _values(parts: Sequence[Tensor]) -> Values:
    values = torch.cat([part.double().cpu() for part in parts])
    if bool(values.isnan().any()):
        raise ValueError(
            "the log-probabilities hold NaN: look for NaN in the weights or their scales, or for overflow (dtype "
            "float16: try bfloat16)"
        )
    return values.numpy()
