"""Log-probabilities of a step, from its tensors to values."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from strata.engine.process.messages import TokenLogprobs

if TYPE_CHECKING:
    from strata.engine.sampler import LogprobTensors


class LogprobRows:
    """The rows of tensors that are on the host. They become Python values at once, when the first of them is read."""

    def __init__(self, tensors: LogprobTensors) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors.chosen)

    def entry(self, row: int, token: int, most: int) -> TokenLogprobs:
        """What `row` tells of `token`, which it was computed for, and of the likeliest `most` ids."""
        chosen, ranks, top_ids, top = self._values
        return TokenLogprobs(token, chosen[row], ranks[row], top_ids[row][:most], top[row][:most])

    @cached_property
    def _values(self) -> tuple[list[float], list[int], list[list[int]], list[list[float]]]:
        tensors = self._tensors
        return (
            tensors.chosen.tolist(),
            tensors.ranks.tolist(),
            tensors.top_ids.tolist(),
            tensors.top.tolist(),
        )
