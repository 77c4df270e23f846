"""A family of the tests whose layers keep a fixed state: a decaying sum behind a short convolution, in plain torch."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor, nn

from strata.hardware.roofline import Cost
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.op import Operation
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch
from strata.models.config import ModelConfig
from strata.models.layers import Attention, CausalLM, Linear
from strata.models.state import LayerState, RecurrentState, attention_states

TAIL = 2


def _decayed(
    x: Tensor, decay: Tensor, offsets: Tensor, positions: Tensor, states: RecurrentStates | None, layer: int
) -> Tensor:
    """[tokens, width] each, the decay before its sigmoid. Token by token s = decay * s + (1 - decay) * entering, where
    x enters with half of the two x before it."""
    out, decay = torch.empty_like(x), torch.sigmoid(decay)
    for number, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if first == end:
            continue
        kept, tail = x.new_zeros(x.shape[1], dtype=torch.float64), x.new_zeros(TAIL, x.shape[1])
        slot = -1 if states is None else int(states.slots[number])
        if states is not None and positions[first]:
            kept, tail = (state[slot].clone() for state in states.tensors[layer])
        known = torch.cat([tail, x[first:end]])
        entering = (1 - decay[first:end]) * (known[TAIL:] + 0.5 * (known[1:-1] + known[:-TAIL]))
        last, rows = kept.numpy(), []
        for row, entered in zip(decay[first:end].double().numpy(), entering.double().numpy(), strict=True):
            last = row * last + entered
            rows.append(last)
        out[first:end] = torch.from_numpy(np.stack(rows))
        if states is not None:
            for state, new in zip(states.tensors[layer], (torch.from_numpy(last), known[-TAIL:]), strict=True):
                state[slot] = new
    return out


# Not in `OPERATIONS`, of which other tests look at all.
decayed = Operation(
    "decayed",
    _decayed,
    lambda *args, workload: Cost(),
    lambda x, *rest: x.to("meta"),
    mutates=("states",),
    reads_state=True,
)
decayed.implement("loop", "cpu", invariant=True)(_decayed)


class Recurrence(nn.Module):
    """In the place of attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        self.spec = AttentionSpec(layer, 1.0)
        self.q_proj, self.k_proj = (Linear(hidden, width, bias=False) for _ in range(2))
        self.o_proj = Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        x, decay = self.q_proj(x), self.k_proj(x)
        return self.o_proj(decayed(x, decay, batch.offsets, batch.positions, batch.states, self.spec.layer))


def family(kinds: str) -> type[CausalLM]:
    """kinds: for each layer r for a recurrence, a for attention, with a window or without as the config says."""

    class Mixed(CausalLM):
        @staticmethod
        def attention(config: ModelConfig, layer: int) -> Attention:
            if kinds[layer] == "r":
                return Recurrence(config, layer)  # type: ignore[return-value]
            return Attention(config, layer)

        @staticmethod
        def states(config: ModelConfig) -> tuple[LayerState, ...]:
            width = config.num_heads * config.head_dim
            fixed = RecurrentState(((width,), (TAIL, width)), (torch.float64, None))
            return tuple(
                fixed if kind == "r" else rows for kind, rows in zip(kinds, attention_states(config), strict=True)
            )

    return Mixed
