"""Vectors of prompts: the model's last hidden states, pooled. No keys or values are kept, so no pages are touched.

Embeddings wait for a place between steps, one batch at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from strata.cache.staging import fetch, send
from strata.engine.faults import memory_explained
from strata.engine.ledger import Ledger
from strata.engine.request import check_prompt_ids
from strata.models.batch import Batch

Pooling = Literal["last", "mean"]


class PoolRequest(NamedTuple):
    """A prompt as token ids; its vector is its last token's hidden state, or the mean of all its tokens'."""

    prompt: Sequence[int]
    pooling: Pooling


@dataclass(frozen=True)
class Pooled:
    """Vectors under way. `vectors`: [prompts, hidden] float32, on the host once they have `ended`. watch: see
    `Launched`."""

    vectors: Tensor
    arrived: torch.cuda.Event | None = None
    watch: Callable[[Callable[[], bool]], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether `wait` would not block."""
        return self.arrived is None or self.arrived.query()

    def wait(self) -> Tensor:
        """[prompts, hidden] float32 on the host, in the order of the requests; a row that is lost to NaN holds NaN."""
        if self.watch is not None:
            self.watch(lambda: self.ended)
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.vectors


class PromptPooler(Protocol):
    """What makes vectors of prompts; see `Pooler`."""

    def check(self, prompt: Sequence[int]) -> None: ...

    def fitting(self, requests: Iterable[PoolRequest], token_limit: float = math.inf) -> int: ...

    def launch(self, requests: Sequence[PoolRequest]) -> Pooled: ...


class Pooler:
    """Runs prompts whole, as many at once as a step of the engine may have tokens.

    hidden: see `StepProgram`. max_tokens: of one step. max_length: of one sequence. vocab_size: ids are below it.
    """

    def __init__(
        self,
        hidden: Callable[[Batch], Tensor],
        max_tokens: int,
        max_length: int,
        vocab_size: int,
        device: torch.device,
        ledger: Ledger,
    ) -> None:
        self._hidden, self._device, self._ledger = hidden, device, ledger
        self._max_tokens, self._max_length, self._vocab_size = max_tokens, max_length, vocab_size

    def check(self, prompt: Sequence[int]) -> None:
        """Raises ValueError if the prompt can never run."""
        length = len(prompt)
        if not length:
            raise ValueError("the prompt is empty: it needs at least one token")
        if length > self._max_length:
            raise ValueError(f"the prompt has {length} tokens, but max_model_len is {self._max_length}: shorten it")
        if length > self._max_tokens:
            raise ValueError(
                f"the prompt has {length} tokens, but an embedding is computed in one step, and a step has at most "
                f"{self._max_tokens}: shorten it, or raise max_num_batched_tokens"
            )
        check_prompt_ids(prompt, self._vocab_size)

    def fitting(self, requests: Iterable[PoolRequest], token_limit: float = math.inf) -> int:
        """How many of the requests, from the first on, one batch of at most so many tokens holds; at least one."""
        most = min(token_limit, self._max_tokens)
        totals = accumulate(len(request.prompt) for request in requests)
        return max(1, sum(1 for _ in takewhile(lambda total: total <= most, totals)))

    @torch.inference_mode()
    def launch(self, requests: Sequence[PoolRequest]) -> Pooled:
        """Start a batch; its vectors, of length 1 (L2), come later. Raises EngineFault if the memory is too small."""
        lengths = [len(request.prompt) for request in requests]
        arrays = {
            "tokens": np.concatenate([np.array(request.prompt, dtype=np.int32) for request in requests]),
            "positions": np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
            "offsets": np.array([0, *accumulate(lengths)], dtype=np.int32),
        }
        with memory_explained(f"embedding {len(lengths)} prompts of {sum(lengths):,} tokens", self._ledger):
            sent = send(self._device, **arrays)
            batch = Batch(sent["tokens"], sent["positions"], sent["offsets"], max(lengths))
            parts = self._hidden(batch).split(lengths)
            rows = [
                part[-1].float() if request.pooling == "last" else part.mean(0, dtype=torch.float32)
                for part, request in zip(parts, requests, strict=True)
            ]
            vectors = torch.nn.functional.normalize(torch.stack(rows), dim=1)
        if self._device.type == "cpu":
            return Pooled(vectors)
        vectors = fetch(vectors)
        arrived = torch.cuda.Event()
        arrived.record()
        return Pooled(vectors, arrived)


def check_vector(vector: Tensor) -> None:
    """Raises ValueError if the vector of a prompt is none."""
    if not bool(vector.isfinite().all()):
        raise ValueError(
            "the prompt's hidden states hold NaN or infinity: look for NaN in the weights, or for overflow (dtype "
            "float16: try bfloat16)"
        )


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
