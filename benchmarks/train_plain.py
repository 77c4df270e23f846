"""T6 in plain PyTorch, independent of Strata: what `strata bench train` is compared with, in speed and in loss.

A Llama of the 1B shape by `torch.compile` of each layer, `scaled_dot_product_attention` (cuDNN), autocast to bfloat16
over float32 weights, cross-entropy in recomputed chunks, and PyTorch's fused AdamW. The same initial weights (seed 0,
drawn on the GPU in the order of the parameters), tokens and rates as `strata bench train`, which takes two steps more
than it times:

    strata bench train --steps 198 --repeat 1 --losses ours.json
    python benchmarks/train_plain.py --steps 200 --against ours.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

GIB = 2**30
PEAK = 989e12
PEAK_RATE = 1e-5


@dataclass(frozen=True)
class Shape:
    """Llama-3.2-1B with a head of its own."""

    vocabulary: int = 128256
    hidden: int = 2048
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    inner: int = 8192
    eps: float = 1e-5


def rotation(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] as Llama 3.2 has them: base 500000, long waves 32 times longer."""
    frequency = 500000.0 ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    rotations = 8192 * frequency / (2 * math.pi)
    share = ((rotations - 1) / (4 - 1)).clamp(0, 1)
    frequency = share * frequency + (1 - share) * frequency / 32
    angles = torch.outer(torch.arange(length).float(), frequency).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [batch, heads, length, head_dim]."""
    left, right = x.float().chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.norm1 = nn.RMSNorm(shape.hidden, shape.eps)
        self.q, self.k = nn.Linear(shape.hidden, queries, bias=False), nn.Linear(shape.hidden, keys, bias=False)
        self.v, self.o = nn.Linear(shape.hidden, keys, bias=False), nn.Linear(queries, shape.hidden, bias=False)
        self.norm2 = nn.RMSNorm(shape.hidden, shape.eps)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, shape: Shape, length: int, dtype: torch.dtype) -> None:
        """dtype: of what goes from layer to layer."""
        super().__init__()
        self.dtype = dtype
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.angles = rotation(shape, length)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).to(self.dtype)
        for layer in self.layers:
            x = layer(x, *self.angles)
        return self.norm(x)


def loss_of(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), targets, reduction="sum")


def mean_loss(hidden: Tensor, head: Tensor, targets: Tensor, compiled: Callable[..., Tensor], rows: int) -> Tensor:
    """In chunks whose logits the backward pass computes once more."""
    parts = zip(hidden.flatten(0, 1).split(rows), targets.flatten().split(rows), strict=True)
    losses = [checkpoint(compiled, part, head, wanted, use_reentrant=False) for part, wanted in parts]
    return torch.stack(losses).sum() / targets.numel()


def tokens_of(step: int, batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Walks along one cycle of 512 ids that jump one time in ten; tokens and targets [batch, length]."""
    cycle = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:512]
    draw = torch.Generator().manual_seed(1 + step)
    jumps = torch.rand(batch, length + 1, generator=draw) < 0.1
    starts = torch.randint(512, (batch, length + 1), generator=draw)
    jumps[:, 0] = True
    index = torch.arange(length + 1).repeat(batch, 1)
    since = (index * jumps).cummax(1).values
    ids = cycle[(starts.gather(1, since) + index - since) % 512]
    return ids[:, :-1], ids[:, 1:]


def fill(model: nn.Module, seed: int) -> None:
    draw = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, 0.02, generator=draw)


def make_model(shape: Shape, length: int, device: str) -> Llama:
    with torch.device(device):
        model = Llama(shape, length, torch.bfloat16 if device == "cuda" else torch.float32)
    fill(model, 0)
    return model


def make_optimizer(model: Llama) -> torch.optim.AdamW:
    decayed = [p for name, p in model.named_parameters() if p.dim() > 1 and name != "embedding.weight"]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or name == "embedding.weight"]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)


def rate_of(step: int, peak: float = PEAK_RATE) -> float:
    return peak * min(1.0, (step + 1) / 20)


def train(
    shape: Shape, batch: int, length: int, steps: int, device: str, peak_rate: float = PEAK_RATE
) -> tuple[list[float], list[float]]:
    """Loss and seconds of each step. On a CPU, where only numbers are compared, nothing is compiled or rounded."""
    model, compiled_loss = make_model(shape, length, device), loss_of
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        for layer in model.layers:
            layer.compile(fullgraph=True, dynamic=False)
        compiled_loss = torch.compile(loss_of, dynamic=False)
    optimizer = make_optimizer(model)
    losses, seconds = [], []
    for step in range(steps):
        wait()
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, peak_rate)
        tokens, targets = (x.to(device) for x in tokens_of(step, batch, length, shape.vocabulary))
        with ExitStack() as around:
            if device == "cuda":
                around.enter_context(torch.autocast("cuda", torch.bfloat16))
                around.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
            loss = mean_loss(model(tokens), model.head.weight, targets, compiled_loss, 4096)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        wait()
        seconds.append(time.perf_counter() - start)
    return [loss.item() for loss in losses], seconds


def flops_per_token(shape: Shape, length: int) -> int:
    """6 * non-embedding parameters + 6 * layers * heads * head_dim * length."""
    with torch.device("meta"):
        model = Llama(shape, 1, torch.float32)
    weights = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    return 6 * weights + 6 * shape.layers * shape.heads * shape.head_dim * length


def read_losses(file: Path) -> list[float]:
    """The losses that another run has written."""
    try:
        losses: list[float] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"--against {file} cannot be read: {error}") from None
    return losses


def largest_difference(losses: list[float], others: list[float]) -> dict[str, float]:
    """Between the losses of two runs at the same step, and that step."""
    if len(losses) != len(others):
        raise SystemExit(f"{len(losses)} steps here, {len(others)} there: take as many steps in both runs")
    differences = [abs(one - other) for one, other in zip(losses, others, strict=True)]
    most = max(differences)
    return {"loss_difference": most, "at_step": differences.index(most)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    parser.add_argument("--against", type=Path, help="such a file of another run, to print the largest difference")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/train_plain.py trains on a CUDA GPU: none here")
    others = None if options.against is None else read_losses(options.against)

    shape = Shape()
    losses, seconds = train(shape, options.batch, options.sequence, options.steps, "cuda")
    timed = seconds[min(5, len(seconds) - 1) :]
    speed = options.batch * options.sequence / statistics.median(timed)
    line = {
        "test": "T6-plain",
        "model": "1B",
        "dtype": "bf16",
        "value": speed,
        "unit": "tok/s",
        "mfu": round(speed * flops_per_token(shape, options.sequence) / PEAK, 4),
        "memory_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    if others is not None:
        line |= largest_difference(losses, others)
    print(json.dumps(line))
    if options.losses is not None:
        options.losses.write_text(json.dumps(losses) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
