"""The memory ledger: what the engine will hold, told before it allocates."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from strata.cache.pool import PoolShape
from strata.models.config import ModelConfig
from strata.models.memory import free_bytes

GIB = 1 << 30
# On a CPU the KV pool may take this share of the memory that is free, since nothing else is known to want it.
CPU_KV_SHARE = 0.25


@dataclass(frozen=True)
class Ledger:
    """Bytes by purpose on one device. `budget` is what the engine may use in all; `margin` is what is left of it."""

    device: str
    total: int
    budget: int
    weights: int
    activations: int
    graphs: int
    pages: int
    page_bytes: int
    page_size: int

    @property
    def kv(self) -> int:
        return self.pages * self.page_bytes

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    @property
    def margin(self) -> int:
        return self.budget - self.weights - self.activations - self.graphs - self.kv

    def lines(self) -> list[str]:
        """The ledger as text, one purpose a line."""
        rows = [
            ("weights", self.weights, ""),
            ("activations", self.activations, "largest step, estimated"),
            ("CUDA graphs", self.graphs, "estimated"),
            ("KV pages", self.kv, f"{self.pages:,} pages of {self.page_size}: {self.tokens:,} tokens"),
            ("margin", self.margin, "unused"),
        ]
        head = f"memory on {self.device}: {self.budget / GIB:.2f} GiB to use of {self.total / GIB:.2f}"
        return [head, *(f"  {name:<12}{size / GIB:>9.3f} GiB  {note}".rstrip() for name, size, note in rows)]


class PoolTooSmall(ValueError):
    """What is left of the memory holds no whole sequence."""

    def __init__(self, problem: str, ledger: Ledger) -> None:
        self._problem, self._ledger = problem, ledger
        super().__init__(
            self.with_advice("lower max_model_len or max_num_batched_tokens, or raise gpu_memory_utilization")
        )

    def with_advice(self, advice: str) -> str:
        """The message for somebody who can change something else."""
        return f"{self._problem}: {advice}\n" + "\n".join(self._ledger.lines())


def available_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a device."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return free_bytes(device) or total, total
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free_bytes(device) or total, total


def activation_bytes(config: ModelConfig, tokens: int, rows: int, dtype: torch.dtype) -> int:
    """An upper estimate of what a step holds beside weights and pages.

    At the widest point of a layer live the residual, its norm, the gate and up projections and their product, or the
    residual and q, k, v with the attention's result; sampling holds a row's logits once in `dtype` and up to four times
    in float32.
    """
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    widest = 2 * config.hidden_size + max(3 * config.intermediate_size, heads * config.head_dim)
    return tokens * widest * dtype.itemsize + rows * config.vocab_size * (dtype.itemsize + 16)


def plan_memory(
    config: ModelConfig,
    pool: PoolShape,
    device: torch.device,
    *,
    weight_bytes: int,
    max_tokens: int,
    max_sequences: int,
    max_length: int,
    utilization: float,
    num_pages: int | None,
    dtype: torch.dtype,
    graph_rows: int,
) -> Ledger:
    """Divide the device's memory.

    graph_rows: rows of logits that CUDA graphs keep.
    Raises ValueError if the pages would not hold one sequence of `max_length` tokens, with what to change.
    """
    free, total = available_memory(device)
    activations = activation_bytes(config, max_tokens, max_sequences, dtype)
    graphs = graph_rows * config.vocab_size * dtype.itemsize + (GIB // 2 if graph_rows else 0)
    per_sequence = -(-max_length // pool.page_size)
    fixed = weight_bytes + activations + graphs
    if device.type == "cuda":
        budget = min(int(total * utilization), free)
        room = budget - fixed
    else:
        budget = free
        room = min(int((budget - fixed) * CPU_KV_SHARE), max_sequences * per_sequence * pool.page_bytes)
    pages = num_pages if num_pages is not None else max(0, room) // pool.page_bytes
    ledger = Ledger(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        total=total,
        budget=budget,
        weights=weight_bytes,
        activations=activations,
        graphs=graphs,
        pages=pages,
        page_bytes=pool.page_bytes,
        page_size=pool.page_size,
    )
    if num_pages is None and pages < per_sequence:
        raise PoolTooSmall(
            f"the KV pool would hold {ledger.tokens:,} tokens, but one sequence may have max_model_len={max_length:,}",
            ledger,
        )
    if ledger.margin < 0:
        raise ValueError(
            f"{pages:,} KV pages do not fit beside the weights: ask for fewer\n" + "\n".join(ledger.lines())
        )
    return ledger
