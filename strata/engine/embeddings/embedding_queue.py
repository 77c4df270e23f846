"""Embeddings that wait for a place between steps, and the batch of them that is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from strata.engine.embeddings.pooling import Pooled, PoolRequest, PromptPooler

# That a batch is to take: beside generations, whose next tokens wait for it, and alone, when one may come any time.
_SECONDS_BESIDE, _SECONDS_ALONE = 0.03, 0.1

Key = tuple[bytes, str]
"""A client, and its name for the request."""


class EmbeddingQueue:
    """First come, first served, one batch at a time. Its length counts what waits and what is under way.

    A key may be used again once its request is dropped, also while that is under way: it is the request, not its key,
    that a vector belongs to.

    Beside generations batches are short, and after each one nothing is begun for three times what it took: however
    many wait here, generations go on at three quarters of their speed. `clock` tells seconds.
    """

    def __init__(self, pooler: PromptPooler, clock: Callable[[], float]) -> None:
        self._pooler = pooler
        self._clock = clock
        self._began = 0.0
        self._rest_until = 0.0
        self._tokens_a_second = 0.0  # of the last batch
        self._waiting: dict[Key, PoolRequest] = {}
        self._wanted: dict[Key, PoolRequest] = {}
        self._under_way: tuple[list[tuple[Key, PoolRequest]], Pooled] | None = None

    def __len__(self) -> int:
        return len(self._waiting) + (len(self._under_way[0]) if self._under_way is not None else 0)

    @property
    def waiting_tokens(self) -> int:
        """Of prompts that are not under way."""
        return sum([len(request.prompt) for request in self._waiting.values()])

    def __contains__(self, key: Key) -> bool:
        return key in self._wanted

    def add(self, key: Key, request: PoolRequest) -> None:
        """Raises ValueError if the prompt can never run."""
        self._pooler.check(request.prompt)
        self._waiting[key] = self._wanted[key] = request

    def drop(self, key: Key) -> None:
        """Nobody wants it any more; a key that is not there is ignored."""
        self._waiting.pop(key, None)
        self._wanted.pop(key, None)

    def drop_all(self, client: bytes) -> None:
        for key in [key for key in self._wanted if key[0] == client]:
            self.drop(key)

    def launch(self, beside_generations: bool) -> None:
        """Start the next batch, unless one is under way or its time has not come."""
        now = self._clock()
        rests = beside_generations and now < self._rest_until
        if self._under_way is None and self._waiting and not rests:
            self._began = now
            most = self._tokens_a_second * (_SECONDS_BESIDE if beside_generations else _SECONDS_ALONE)
            count = self._pooler.fitting(self._waiting.values(), most)
            batch = [(key, self._waiting.pop(key)) for key in list(self._waiting)[:count]]
            self._under_way = batch, self._pooler.launch([request for _, request in batch])

    def collect(self, wait: bool) -> Iterator[tuple[Key, Tensor]]:
        """The vectors of the batch under way that are still wanted; none if it is not done, unless told to wait."""
        if self._under_way is None or not (wait or self._under_way[1].ended):
            return
        batch, pooled = self._under_way
        self._under_way = None
        took = max(1e-6, self._clock() - self._began)
        self._rest_until = self._began + 4 * took
        self._tokens_a_second = sum(len(request.prompt) for _, request in batch) / took
        for (key, request), vector in zip(batch, pooled.wait(), strict=True):
            if self._wanted.get(key) is request:
                del self._wanted[key]
                yield key, vector
