"""The training test T6: what it trains on, its arithmetic and the least time that a device can take for a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from strata.hardware.figures import Device
from strata.hardware.roofline import Cost, floor
from strata.models.config import ModelConfig
from strata.train.data.pack import PackedBatch

# Tokens walk along one cycle of so many ids and jump to another place of it with this probability.
CYCLE = 512
JUMP = 0.1
# Losses are compared with another script's, and from 3e-5 on runs that round differently part ways (docs/log.md).
PEAK_RATE = 1e-5
WARMUP = 20


def synthetic_tokens(step: int, sequences: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step, [sequences * length] int64 on the CPU, the same in every run.

    A sequence follows a fixed cycle of `CYCLE` random ids, and jumps to a random place of it one time in ten: about
    0.95 nats a token once the cycle is learned.
    """
    cycle = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:CYCLE]
    rng = torch.Generator().manual_seed(1 + step)
    jumps = torch.rand(sequences, length + 1, generator=rng) < JUMP
    jumps[:, 0] = True
    places = torch.randint(len(cycle), (sequences, length + 1), generator=rng)
    at = torch.arange(length + 1).expand(sequences, -1)
    last = torch.where(jumps, at, 0).cummax(1).values
    walk = cycle[(places.gather(1, last) + at - last) % len(cycle)]
    return walk[:, :-1].flatten(), walk[:, 1:].flatten()


def synthetic_batch(step: int, sequences: int, length: int, vocabulary: int) -> PackedBatch:
    """The same as a batch in which every token has a target."""
    tokens, targets = synthetic_tokens(step, sequences, length, vocabulary)
    count = sequences * length
    return PackedBatch(
        tokens=tokens.int().numpy(),
        positions=np.tile(np.arange(length, dtype=np.int32), sequences),
        offsets=np.arange(0, count + 1, length, dtype=np.int32),
        rows=np.arange(count),
        targets=targets.numpy(),
    )


def learning_rate(step: int, peak: float = PEAK_RATE) -> float:
    """Linear warm-up, then constant."""
    return peak * min(1.0, (step + 1) / WARMUP)


@dataclass(frozen=True)
class TrainingWork:
    """What a step of `tokens` tokens in sequences of `length` has to compute, and to move for its update.

    weights: parameters that are multiplied by (all but the embedding). parameters: all of them.
    """

    config: ModelConfig
    tokens: int
    length: int
    weights: int
    parameters: int

    @property
    def flops_per_token(self) -> int:
        """6 * non-embedding parameters + 6 * layers * heads * head_dim * length: causal pairs, nothing twice."""
        config = self.config
        return 6 * self.weights + 6 * config.num_layers * config.num_heads * config.head_dim * self.length

    def floor(self, device: Device, precision: str) -> float:
        """Seconds: products and attention at the measured rates, then AdamW, which has to wait for the norm.

        precision: of the layers' products; the head and attention stay bfloat16. AdamW reads and writes master and
        moments (float32), reads the gradient and writes the weight (2 bytes each).
        """
        narrow = 0 if precision == "bf16" else self.weights - self.config.vocab_size * self.config.hidden_size
        wide = floor(Cost(self.tokens * (self.flops_per_token - 6 * narrow)), device, "bfloat16")
        narrow_seconds = floor(Cost(self.tokens * 6 * narrow), device, "float8").seconds if narrow else 0.0
        update = floor(Cost(read=14 * self.parameters, written=14 * self.parameters), device, "bfloat16")
        return wide.seconds + narrow_seconds + update.seconds
