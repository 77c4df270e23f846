"""The shapes that PyTorch has a cuDNN graph for: it builds one for each new shape, while whoever called waits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import local

from torch import Tensor


class _Met(local):
    """What each thread has met, for as long as it runs: its plans are its own, and end with it."""

    def __init__(self) -> None:
        self.plans: set[tuple[object, ...]] = set()


class LibraryPlans:
    """listeners: called with each new shape, in words."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[str], None]] = []
        self._met = _Met()

    def use(self, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool, summed: bool) -> None:
        """Attention is about to be computed by the library. queries, keys, values: [sequences, heads, tokens,
        head_dim]. summed: with the log-sum-exps of the scores."""
        layout = (queries.shape, keys.shape, queries.stride(), keys.stride(), values.stride())
        plan = (queries.device, queries.dtype, *layout, causal, summed)
        if plan in self._met.plans:
            return
        self._met.plans.add(plan)
        sequences, heads, rows, width = queries.shape
        shape = (
            f"{sequences} x {rows} queries, {keys.shape[2]} keys, {heads} and {keys.shape[1]} heads of {width}"
            f"{', causal' * causal}{', log-sum-exps' * summed}"
        )
        for listener in self.listeners:
            listener(shape)


@cache
def library_plans() -> LibraryPlans:
    """Those of the process, always the same: PyTorch keeps its plans, whichever engine they were built for."""
    return LibraryPlans()
