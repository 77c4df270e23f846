"""Draws and log-probabilities where the ranks of a served model hold logits of different ids, and leave them there.

The ranks tell each other of a row what its parts make it: for a draw one number (`strata.kernels.sampling.shards`), for
log-probabilities a few (`strata.kernels.sampling.shards`). Filters alone need all logits of a row together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from strata.comm.mesh import Axis
from strata.comm.operations import Along, all_gather
from strata.kernels.sampling.shards import (
    best_in_shard,
    best_of_shards,
    count_above,
    logprobs_in_shard,
    logprobs_of_shards,
)
from strata.parallel.serving_shard import TENSOR_AXIS, RankShard


@dataclass(frozen=True)
class VocabularyShard:
    """The ids whose logits a rank holds: `count` of the `vocabulary` ids, from `first` on.

    along: the axis of the ranks, an `Along` in a graph that is not bound. Logits of a rank are [rows, held], with the
    same `held` on all ranks; columns from `count` on, of the last ones, are of no id. All ranks call alike.
    """

    along: Along | Axis
    first: int
    count: int
    vocabulary: int

    @classmethod
    def of(cls, shard: RankShard) -> Self:
        held, vocabulary = shard.config.vocab_size, shard.whole.vocab_size
        first = min(shard.index * held, vocabulary)
        return cls(shard.axes[TENSOR_AXIS], first, min(held, vocabulary - first), vocabulary)

    def unbound(self) -> Self:
        """For a graph that will be bound."""
        return replace(self, along=Along(TENSOR_AXIS, self.along.size))

    def local(self, logits: Tensor) -> Tensor:
        """The columns of ids, [rows, count], as a view."""
        return logits.narrow(-1, 0, self.count)

    def whole(self, logits: Tensor) -> Tensor:
        """The logits of all ids, [rows, vocabulary], which every rank sends to every other."""
        return self.gather(logits).narrow(-1, 0, self.vocabulary)

    def draw(self, logits: Tensor, temperatures: Tensor, seeds: Tensor, steps: Tensor) -> Tensor:
        """The ids [rows] int32 that `gumbel_sample` draws from the whole logits, by one message of 8 bytes a row."""
        keys = best_in_shard(self.local(logits), temperatures, seeds, steps, self.first)
        ids: Tensor = best_of_shards(self.gather(keys))
        return ids

    def logprobs(self, logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `strata.kernels.sampling.sampling.logprobs` gives, of ids of the whole vocabulary, by two messages."""
        own, ranks = self.local(logits), self.along.size
        found = self.gather(logprobs_in_shard(own, ids, top, self.first))
        chosen, *told = logprobs_of_shards(found.unflatten(1, (ranks, -1)), self.vocabulary)
        above = self.gather(count_above(own, chosen))
        return told[0], above.sum(1, dtype=above.dtype) + 1, told[1], told[2]

    def gather(self, columns: Tensor) -> Tensor:
        """What all ranks have, [rows, columns], side by side."""
        gathered: Tensor = all_gather(columns, self.along, -1)
        return gathered
