"""Configs of families that keep states of fixed size, and their steps by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from strata.kernels.state.fixed import FixedStates
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.families import FAMILIES
from strata.models.state import FixedState

Config = dict[str, Any]


def _mamba2(vocab: int, hidden: int, layers: int, **own: Any) -> Config:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers}
    return {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"} | sizes | own


RECURRENT_CONFIGS: dict[str, Config] = {
    "mamba2": _mamba2(97, 24, 2, num_heads=6, head_dim=8, n_groups=3, state_size=12, conv_kernel=4, chunk_size=64),
    "mamba2-limited-tied": _mamba2(
        83,
        20,
        2,
        num_heads=3,
        head_dim=20,
        expand=3,
        n_groups=1,
        state_size=9,
        conv_kernel=2,
        chunk_size=32,
        use_bias=True,
        use_conv_bias=False,
        residual_in_fp32=False,
        time_step_limit=[0.02, 0.6],
        layer_norm_epsilon=1e-4,
        tie_word_embeddings=True,
    ),
    "mamba2-wide-heads": _mamba2(
        61, 28, 3, num_heads=2, head_dim=28, n_groups=2, state_size=5, conv_kernel=3, time_step_limit=[0.0, 2.5]
    ),
}


class HandStates:
    """Fixed states of a few sequences, in rows that go backwards and that nobody has filled."""

    def __init__(self, config: ModelConfig, sequences: int, dtype: torch.dtype = torch.float32) -> None:
        self.lengths = [0] * sequences
        self.tensors = tuple(
            tuple(
                torch.full((sequences + 1, *shape), torch.nan, dtype=one or dtype)
                for shape, one in zip(state.shapes, state.dtypes, strict=True)
            )
            if isinstance(state, FixedState)
            else ()
            for state in FAMILIES[config.architecture].states(config)
        )

    def next_batch(self, chunks: dict[int, Sequence[int]]) -> Batch:
        """The next tokens of some sequences, by their number."""
        tokens, positions, offsets = [], [], [0]
        for row, chunk in chunks.items():
            tokens += chunk
            positions += range(self.lengths[row], self.lengths[row] + len(chunk))
            offsets.append(len(tokens))
            self.lengths[row] += len(chunk)
        slots = torch.tensor([len(self.lengths) - row for row in chunks], dtype=torch.int32)
        ids, at, starts = (torch.tensor(values, dtype=torch.int32) for values in (tokens, positions, offsets))
        longest = max(map(len, chunks.values()))
        return Batch(ids, at, starts, longest, states=FixedStates(self.tensors, slots))
