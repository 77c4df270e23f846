"""Embeddings that wait for a place between steps, and the batch of them that is under way."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from strata.engine.pooling import Pooled, Pooler, PoolRequest

Key = tuple[bytes, str]
"""A client, and its name for the request."""


class EmbeddingQueue:
    """First come, first served, one batch at a time. Its length counts what waits and what is under way."""

    def __init__(self, pooler: Pooler) -> None:
        self._pooler = pooler
        self._waiting: dict[Key, PoolRequest] = {}
        self._wanted: set[Key] = set()
        self._under_way: tuple[list[Key], Pooled] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (len(self._under_way[0]) if self._under_way is not None else 0)

    def __contains__(self, key: Key) -> bool:
        return key in self._wanted

    def add(self, key: Key, request: PoolRequest) -> None:
        """Raises ValueError if the prompt can never run."""
        self._pooler.check(request.prompt)
        self._waiting[key] = request
        self._wanted.add(key)

    def drop(self, key: Key) -> None:
        """Nobody wants it any more; a key that is not there is ignored."""
        self._waiting.pop(key, None)
        self._wanted.discard(key)

    def drop_all(self, client: bytes) -> None:
        for key in [key for key in self._wanted if key[0] == client]:
            self.drop(key)

    def launch(self) -> None:
        """Start the next batch, unless one is under way."""
        if self._under_way is None and self._waiting:
            count = self._pooler.fitting(self._waiting.values())
            keys = list(self._waiting)[:count]
            self._under_way = keys, self._pooler.launch([self._waiting.pop(key) for key in keys])

    def collect(self, wait: bool) -> Iterator[tuple[Key, Tensor]]:
        """The vectors of the batch under way that are still wanted; none if it is not done, unless told to wait."""
        if self._under_way is None or not (wait or self._under_way[1].done):
            return
        keys, pooled = self._under_way
        self._under_way = None
        for key, vector in zip(keys, pooled.wait(), strict=True):
            if key in self._wanted:
                self._wanted.remove(key)
                yield key, vector
