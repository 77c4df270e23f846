"""A two-layer attention model of Strata operations, small enough to count by hand; the graph floor knows no other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strata.kernels.activation.silu_mul import silu_mul
from strata.kernels.attention.attention import attention
from strata.kernels.attention.spec import AttentionSpec
from strata.kernels.linear.embedding import embedding
from strata.kernels.linear.linear import linear
from strata.kernels.norm.norm import rms_norm
from strata.kernels.state.kv_write import kv_write
from strata.models.batch import Batch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY, LAYERS = 24, 4, 2, 6, 40, 50, 2


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, 1e-6)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN))

    def forward(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, self.weight)


class Layer(nn.Module):
    def __init__(self, index: int, biased: str) -> None:
        super().__init__()
        self.index = index
        self.before = Norm(HIDDEN)
        self.q_proj = Linear(HIDDEN, HEADS * HEAD_DIM, "q" in biased)
        self.k_proj = Linear(HIDDEN, KV_HEADS * HEAD_DIM, "k" in biased)
        self.v_proj = Linear(HIDDEN, KV_HEADS * HEAD_DIM, "v" in biased)
        self.o_proj = Linear(HEADS * HEAD_DIM, HIDDEN)
        self.after = Norm(HIDDEN)
        self.gate_proj = Linear(HIDDEN, INNER)
        self.up_proj = Linear(HIDDEN, INNER)
        self.down_proj = Linear(INNER, HIDDEN)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        normed = self.before(x)
        q = self.q_proj(normed).unflatten(-1, (-1, HEAD_DIM))
        k = self.k_proj(normed).unflatten(-1, (-1, HEAD_DIM))
        v = self.v_proj(normed).unflatten(-1, (-1, HEAD_DIM))
        k, v = kv_write(k, v, batch.pages, self.index)
        mixed = attention(q, k, v, batch, AttentionSpec(self.index, HEAD_DIM**-0.5))
        x = x + self.o_proj(mixed.flatten(-2))
        normed = self.after(x)
        return x + self.down_proj(silu_mul(self.gate_proj(normed), self.up_proj(normed)))


class Tiny(nn.Module):
    def __init__(self, biased: str = "") -> None:
        super().__init__()
        self.embed = Embedding()
        self.layers = nn.ModuleList(Layer(index, biased) for index in range(LAYERS))
        self.norm = Norm(HIDDEN)
        self.lm_head = Linear(HIDDEN, VOCABULARY)
        self.requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch.tokens)
        for layer in self.layers:
            x = layer(x, batch)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)


def packed(*lengths: int) -> Batch:
    """Whole sequences of the given lengths, without pages, with the same ids whatever stands beside them."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    positions = torch.cat([torch.arange(length) for length in lengths]).int()
    return Batch((positions * 7 + 3) % VOCABULARY, positions, torch.tensor(starts, dtype=torch.int32), max(lengths))
