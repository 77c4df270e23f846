"""Vectors of prompts: the model's last hidden states, pooled. No keys or values are kept, so no pages are touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from strata.engine.faults import memory_explained
from strata.engine.ledger import Ledger
from strata.engine.request import check_prompt_ids
from strata.engine.transfer import fetch, send
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

    def fitting(self, requests: Iterable[PoolRequest], most_tokens: float = math.inf) -> int: ...

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

    def fitting(self, requests: Iterable[PoolRequest], most_tokens: float = math.inf) -> int:
        """How many of the requests, from the first on, one batch of at most so many tokens holds; at least one."""
        most = min(most_tokens, self._max_tokens)
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
