"""What a rank gives that rank 0 has not, as it travels there: ids, log-probabilities, vectors."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from strata.engine.embeddings.pooling import Pooled
from strata.engine.ranks.messages import Answer, Drawn, PromptScores, TensorValues, Vectors
from strata.engine.runner import Launched, PromptLogprobs
from strata.engine.sampler import LogprobTensors


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
        return Vectors(number, _values(ended.wait()))
    scores = tuple(PromptScores(one.sequence, one.first, _all_values(one.tensors)) for one in ended.prompt_logprobs)
    logprobs = None if ended.logprobs is None else _all_values(ended.logprobs)
    return Drawn(number, tuple(ended.wait()), logprobs, scores)


def logprobs_of(told: Drawn) -> LogprobTensors | None:
    """Of a step's draws."""
    return None if told.logprobs is None else _logprobs(told.logprobs)


def prompt_logprobs_of(told: Drawn) -> tuple[PromptLogprobs, ...]:
    return tuple(PromptLogprobs(one.sequence, one.first, _logprobs(one.tensors)) for one in told.prompt_logprobs)


def tensor_of(values: TensorValues) -> Tensor:
    array = np.frombuffer(values.values, dtype=np.dtype(values.dtype).newbyteorder("<"))
    return torch.from_numpy(array.astype(np.dtype(values.dtype)).reshape(values.shape))


def _values(tensor: Tensor) -> TensorValues:
    array = tensor.numpy()
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return TensorValues(array.dtype.name, array.shape, little.tobytes())


def _all_values(found: LogprobTensors) -> tuple[TensorValues, ...]:
    return tuple(_values(one) for one in (found.chosen, found.ranks, found.top_ids, found.top))


def _logprobs(values: Sequence[TensorValues]) -> LogprobTensors:
    return LogprobTensors(*map(tensor_of, values))
