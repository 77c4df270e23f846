"""What a rank gives that rank 0 has not, as it travels there: ids, log-probabilities, vectors."""

from __future__ import annotations

import queue
from contextlib import suppress

from strata.engine.embeddings.pooling import Pooled
from strata.engine.ranks.messages import Answer, Drawn, Vectors
from strata.engine.runner import Launched


class Answers:
    """What has come from a rank that tells; one thread puts it here, another takes it."""

    def __init__(self) -> None:
        self._coming: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._kept: dict[int, Answer] = {}
        self._first = 0

    def put(self, answer: Answer) -> None:
        self._coming.put(answer)

    def take(self, number: int, seconds: float) -> Answer | None:
        """The answer to message `number`; None if it does not come in so many seconds."""
        with suppress(queue.Empty):
            while number not in self._kept:
                came = self._coming.get(timeout=seconds)
                if isinstance(came, Vectors) or came.number >= self._first:
                    self._kept[came.number] = came
        return self._kept.pop(number, None)

    def forget_steps(self, before: int) -> None:
        """Nobody will take the answers of steps before message `before`."""
        self._first = before
        self._kept = {number: one for number, one in self._kept.items() if isinstance(one, Vectors)}


def answer_of(number: int, ended: Launched | Pooled) -> Answer:
    """What rank 0 is told of a step, or of prompts, that have ended. number: of the message that asked for it."""
    if isinstance(ended, Pooled):
        return Vectors(number, ended.wait())
    return Drawn(number, tuple(ended.wait()), ended.logprobs, ended.prompt_logprobs)
