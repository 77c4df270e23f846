"""How embeddings share the engine with generations, on a clock of the test's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from strata.engine.embeddings.embedding_queue import EmbeddingQueue
from strata.engine.embeddings.pooling import Pooler, PoolRequest

TOKENS, SECONDS_A_TOKEN, SECONDS_A_STEP = 800, 2**-12, 0.01


class Machine:
    """A clock, and a pooler that takes its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds_a_token = SECONDS_A_TOKEN
        self.batches: list[int] = []
        self.queue = EmbeddingQueue(self, lambda: self.now)  # type: ignore[arg-type]
        self._fitting = Pooler.fitting

    def check(self, prompt: Sequence[int]) -> None:
        pass

    def fitting(self, requests: Any, most_tokens: float = math.inf) -> int:
        return self._fitting(SimpleNamespace(_max_tokens=TOKENS), requests, most_tokens)  # type: ignore[arg-type]

    def launch(self, requests: Sequence[PoolRequest]) -> Any:
        tokens = sum(len(request.prompt) for request in requests)
        self.batches.append(tokens)
        self.now += tokens * self.seconds_a_token
        return SimpleNamespace(ended=True, wait=lambda: torch.zeros(len(requests), 1))

    def add(self, count: int, length: int) -> None:
        for number in range(count):
            self.queue.add((b"client", f"{len(self.batches)}-{number}"), PoolRequest([1] * length, "last"))

    def steps(self, count: int, generating: bool) -> float:
        """Seconds of the steps."""
        start = self.now
        for _ in range(count):
            self.queue.launch(beside_generations=generating)
            self.now += SECONDS_A_STEP if generating else 0.0
            list(self.queue.collect(wait=not generating))
        return self.now - start


def test_generations_keep_three_quarters_of_the_time_however_many_embeddings_wait() -> None:
    machine = Machine()
    machine.add(5000, 25)
    machine.steps(10, generating=True)
    took = machine.steps(1000, generating=True)
    assert 1000 * SECONDS_A_STEP / took > 0.7
    assert max(machine.batches) * SECONDS_A_TOKEN <= 0.03
    assert len(machine.batches) > 20  # and embeddings go on


def test_alone_they_take_what_a_step_holds_or_a_tenth_of_a_second() -> None:
    machine = Machine()
    machine.add(256, 25)
    machine.steps(4, generating=False)
    assert machine.batches == [25, 400, 400, 400]  # the first tells how fast the machine is
    machine.seconds_a_token /= 8
    machine.steps(2, generating=False)
    assert machine.batches[4:] == [400, TOKENS]


def test_one_that_takes_longer_runs_alone() -> None:
    machine = Machine()
    machine.add(3, 400)
    machine.steps(1, generating=True)
    assert machine.batches == [400]
