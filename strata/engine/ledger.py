"""The memory ledger: what the engine will hold, counted before it allocates."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from strata.cache.groups import divide_pages
from strata.cache.window_pages import page_limit
from strata.engine.engine_config import EngineSizes
from strata.models.config import ModelConfig
from strata.models.memory import free_bytes
from strata.text.counted import counted

GIB = 1 << 30
# On a CPU the KV pool may take this share of the memory that is free, since nothing else is known to want it.
CPU_KV_SHARE = 0.25
# Bytes for each id of the vocabulary and row that is sampled with penalties, biases, masks and log-probabilities.
SAMPLING_BYTES = 40
# Rows of prompt log-probabilities that are projected onto the vocabulary at once.
PROMPT_LOGPROB_ROWS = 256
# Snapshots of fixed states: at most so many for each sequence that can run, and this share of what is left for pages.
_SNAPSHOTS_KEPT = 2
_SNAPSHOT_SHARE = 0.25
# Pages that are numbers alone. The prefix tree fills them all with the ids of what has run, at some 850 bytes each.
_NUMBERED_PAGES = 1 << 21


class WindowPool(NamedTuple):
    """Pages of layers that keep the rows of a window."""

    window: int
    pages: int
    page_bytes: int


@dataclass(frozen=True)
class Ledger:
    """Bytes by purpose on one device. `budget` is what the engine may use in all; `margin` is what is left of it.

    planned: activations of the largest step by the lifetimes of its buffers, without sampling; 0 until that is known.
    others: what is in use already, by this process or by others. captured: sizes of steps that have CUDA graphs.
    messages: buffers of what ranks send each other. pages, page_bytes: of the first group of layers that keep rows of
    one kind, and `windows`: of the others. state_rows: for fixed states, of which each takes `state_bytes`; the last
    `snapshots` of them are for prefixes.
    """

    device: str
    total: int
    others: int
    budget: int
    weights: int
    activations: int
    sequences: int
    graphs: int
    captured: int
    pages: int
    page_bytes: int
    page_size: int
    messages: int = 0
    windows: tuple[WindowPool, ...] = ()
    state_rows: int = 0
    snapshots: int = 0
    state_bytes: int = 0
    planned: int = 0

    @property
    def states(self) -> int:
        return self.state_rows * self.state_bytes

    @property
    def kv(self) -> int:
        return self.pages * self.page_bytes + sum(pool.pages * pool.page_bytes for pool in self.windows)

    @property
    def group_pages(self) -> tuple[int, ...]:
        """Of each group of layers."""
        return self.pages, *(pool.pages for pool in self.windows)

    def agreed(self, least: Callable[[int], int]) -> Ledger:
        """With as many pages as all ranks have; least: a rank's number in, the smallest of all out."""
        windows = tuple(pool._replace(pages=least(pool.pages)) for pool in self.windows)
        agreed = replace(self, pages=least(self.pages), windows=windows)
        if self.state_bytes:
            snapshots = least(self.snapshots)
            rows = self.state_rows - self.snapshots + snapshots
            agreed = replace(agreed, state_rows=rows, snapshots=snapshots)
        return agreed

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    @property
    def margin(self) -> int:
        fixed = self.weights + self.activations + self.sequences + self.graphs + self.messages
        return self.budget - fixed - self.states - self.kv

    def lines(self) -> list[str]:
        """The ledger as text, one purpose a line."""
        rows = [
            ("weights", self.weights, ""),
            ("activations", self.activations, f"largest step, estimated{self._planned_note}"),
            ("sequences", self.sequences, "block tables, ids that penalties count, masks"),
            ("CUDA graphs", self.graphs, f"{self.captured} sizes of steps, estimated"),
            *([("messages", self.messages, "between ranks, estimated")] if self.messages else []),
            (
                "KV pages",
                self.pages * self.page_bytes,
                f"{counted(self.pages, 'page')} of {self.page_size}: {counted(self.tokens, 'token')}",
            ),
            *(
                (
                    "windows",
                    pool.pages * pool.page_bytes,
                    f"{counted(pool.pages, 'page')} for layers that see {pool.window:,}",
                )
                for pool in self.windows
            ),
            *([("states", self.states, self._states_note)] if self.state_bytes else []),
            ("margin", self.margin, "unused"),
        ]
        head = f"memory on {self.device}: {self.budget / GIB:.2f} GiB to use of {self.total / GIB:.2f}"
        head += f" ({self.others / GIB:.2f} in use already)" if self.others > 0 else ""
        return [head, *(f"  {name:<12}{size / GIB:>9.3f} GiB  {note}".rstrip() for name, size, note in rows)]

    @property
    def _planned_note(self) -> str:
        return f"; {self.planned / GIB:.3f} planned, without sampling" if self.planned else ""

    @property
    def _states_note(self) -> str:
        live = self.state_rows - self.snapshots
        return f"{live:,} of {self.state_bytes / (1 << 20):,.1f} MiB for sequences, {self.snapshots:,} for prefixes"


class PoolTooSmall(ValueError):
    """The memory does not hold the weights, or what they leave of it holds no whole sequence."""

    def __init__(self, problem: str, ledger: Ledger, advice: str) -> None:
        self._problem, self._ledger, self._advice = problem, ledger, advice
        super().__init__(self.with_advice(advice))

    def with_advice(self, advice: str) -> str:
        """The message for somebody who can change something else."""
        return f"{self._problem}: {advice}\n" + "\n".join(self._ledger.lines())

    def with_options(self, options: Sequence[str]) -> PoolTooSmall:
        """The same, with options with which there is room, each alone."""
        advice = f"{self._advice}, or give {' or '.join(options)}" if options else self._advice
        return PoolTooSmall(self._problem, self._ledger, advice)


class DeviceMemory(NamedTuple):
    """Of a device, in bytes."""

    name: str
    free: int
    total: int


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
    residual and q, k, v with the attention's result; or, where ranks divide these, the residual with a product before
    and after its sum over the ranks, and the norm of what follows. Sampling holds a row's logits in `dtype` and
    SAMPLING_BYTES more for each, if all that sampling can do is asked for.
    """
    # Gates stand in the product of the queries; their sigmoids, and what these let through, are made behind the result.
    heads = ((2 + 3 * config.has_query_gates) * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    if config.latent is not None:
        # Queries, and in the space of the latent; what they find there, and of it; or keys and values of each head.
        heads = 2 * config.num_heads * (config.head_dim + config.latent.rank + config.latent.value)
    if config.recurrence is not None:
        # All inputs of a recurrence at once, what the convolution makes of some, and the result; a wide residual.
        space = config.recurrence
        held = space.product_size + space.conv_size + space.inner_size
        heads = max(heads, held + config.hidden_size * space.wide_residual)
    width = 3 * config.intermediate_size
    if config.experts is not None:
        # Of each expert of a token its row, gate, up and their product, and what comes of the row; within bounds gate
        # and up, and four in float32, two elements each in 16 bits.
        each = 2 * config.hidden_size + 3 * config.experts.intermediate_size
        if config.experts.clamp is not None:
            each = (2 + 4 * 2) * config.experts.intermediate_size
        width = max(width, config.experts.per_token * each)
    widest = 2 * config.hidden_size + max(width, heads, 2 * config.hidden_size)
    return tokens * widest * dtype.itemsize + rows * config.vocab_size * (dtype.itemsize + SAMPLING_BYTES)


def sequence_bytes(config: ModelConfig, slots: int, max_length: int, page_size: int) -> int:
    """What is kept for so many sequences beside their pages: their block tables, twice because a step gathers those of
    its rows; their ids in int64, which penalties count; and a mask of the ids that a grammar allows."""
    pages = -(-max_length // page_size)
    return (slots + 1) * (2 * 4 * pages + 8 * (max_length + 1) + config.vocab_size // 8 + 4)


def snapshot_rows(room: int, max_sequences: int, state_bytes: int) -> int:
    """How many snapshots of fixed states are kept of what is left for pages, beside so many sequences."""
    return min(_SNAPSHOTS_KEPT * max_sequences, max(0, int(room * _SNAPSHOT_SHARE)) // state_bytes)


def numbered_pages(max_sequences: int, per_sequence: int) -> int:
    """Pages of a model of which no layer keeps any: numbers alone. per_sequence: of the longest one."""
    return max(per_sequence, min(_SNAPSHOTS_KEPT * max_sequences * per_sequence, _NUMBERED_PAGES))


def bytes_beside_snapshots(pages: int, max_sequences: int, state_bytes: int) -> int:
    """The bytes that leave so many of them for pages once snapshots have got theirs."""
    return min(pages + _SNAPSHOTS_KEPT * max_sequences * state_bytes, math.ceil(pages / (1 - _SNAPSHOT_SHARE)))


def plan_memory(
    config: ModelConfig,
    sizes: EngineSizes,
    device: torch.device,
    *,
    weight_bytes: int,
    utilization: float,
    num_pages: int | None,
    scratch: int,
    sharing: int = 1,
    messages: int = 0,
    sources: int = 1,
    memory: DeviceMemory | None = None,
    takes_snapshots: bool = False,
) -> Ledger:
    """Divide the device's memory.

    memory: of a device that need not be here; None: of `device` as it is now. sharing: how many processes like this one
    a host's memory is for; a GPU is of one. messages: bytes that those between ranks need. sources: ranks whose rows
    meet at experts, each of them as many as the step of one has. takes_snapshots: prefixes of fixed states are kept.
    utilization: the share of a GPU that may be in use once the engine is, by whomever. scratch: bytes that decode
    attention needs beside its result.
    Raises ValueError if the pages would not hold one sequence of the longest, with what to change.
    """
    pool, groups, captured, dtype = sizes.pool, sizes.groups, sizes.captured, sizes.pool.dtype
    max_tokens, max_sequences, max_length = sizes.max_tokens, sizes.max_sequences, sizes.max_length
    free, total = available_memory(device) if memory is None else (memory.free, memory.total)
    if device.type == "cpu":
        free //= sharing
    # A step has as many rows of logits as sequences that draw, or as are scored at once.
    rows = max(max_sequences, min(PROMPT_LOGPROB_ROWS, max_tokens))
    activations = activation_bytes(config, max_tokens * sources, rows, dtype) + scratch
    sequences = sequence_bytes(config, max_sequences, max_length, pool.page_tokens)
    # Captured steps have memory of their own, which they share.
    graphs = 0
    if captured:
        logits = max(size.draws for size in captured) * config.vocab_size * dtype.itemsize
        largest = activation_bytes(config, max(size.tokens for size in captured) * sources, 0, dtype)
        graphs = largest + logits + GIB // 2 + scratch
    per_sequence = -(-max_length // pool.page_tokens)
    state_bytes = 0 if sizes.states is None else sizes.states.row_bytes
    fixed = weight_bytes + activations + sequences + graphs + messages + (max_sequences + 1) * state_bytes
    others = 0
    if device.type == "cuda":
        others = total - free
        budget = max(0, int(total * utilization) - others)
        room = budget - fixed
    else:
        budget = free
        room = int((budget - fixed) * CPU_KV_SHARE)
    snapshots = 0
    if state_bytes and takes_snapshots:
        snapshots = snapshot_rows(room, max_sequences, state_bytes)
        room -= snapshots * state_bytes
    if device.type == "cpu":
        room = min(room, max_sequences * per_sequence * sum(group.shape.page_bytes for group in groups))
    useful = [group.max_useful(max_sequences, max_tokens, max_length) for group in groups]
    if num_pages is None and not groups[0].layers:
        counts: tuple[int, ...] = (numbered_pages(max_sequences, per_sequence),)
    elif num_pages is None:
        counts = divide_pages(groups, max(0, room), useful)
    else:
        counts = (num_pages, *(num_pages if most is None else min(num_pages, most) for most in useful[1:]))
    pages = counts[0]
    ledger = Ledger(
        device=_name(device) if memory is None else memory.name,
        total=total,
        others=others,
        budget=budget,
        weights=weight_bytes,
        activations=activations,
        sequences=sequences,
        graphs=graphs,
        captured=len(captured),
        pages=pages,
        page_bytes=groups[0].shape.page_bytes,
        page_size=pool.page_tokens,
        messages=messages,
        windows=tuple(
            WindowPool(group.window or 0, count, group.shape.page_bytes)
            for group, count in zip(groups[1:], counts[1:], strict=True)
        ),
        state_rows=(max_sequences + 1 if state_bytes else 0) + snapshots,
        snapshots=snapshots,
        state_bytes=state_bytes,
    )
    if weight_bytes > budget:
        raise _weights_too_large(ledger)
    if budget - fixed < 0 <= budget - fixed + (max_sequences + 1) * state_bytes and state_bytes:
        raise ValueError(
            f"the states of fixed size of max_num_seqs={max_sequences} sequences need {ledger.states / GIB:.2f} GiB: "
            "lower max_num_seqs\n" + "\n".join(ledger.lines())
        )
    needed = [
        per_sequence if group.window is None else min(per_sequence, page_limit(group.window, pool.page_size) + 1)
        for group in groups
    ]
    if num_pages is None and any(there < least for there, least in zip(counts, needed, strict=True)):
        raise PoolTooSmall(
            f"the KV pool would hold {counted(ledger.tokens, 'token')}, but one sequence may have "
            f"max_model_len={max_length:,}",
            ledger,
            "lower max_model_len, max_num_seqs or max_num_batched_tokens, or raise gpu_memory_utilization",
        )
    if ledger.margin < 0:
        raise ValueError(
            f"{pages:,} KV pages do not fit beside the weights: ask for fewer\n" + "\n".join(ledger.lines())
        )
    return ledger


def _weights_too_large(ledger: Ledger) -> PoolTooSmall:
    """Whatever else is asked for: what helps is less of them, or more memory."""
    used = f" ({ledger.others / GIB:.2f} are in use already)" if ledger.others > GIB else ""
    return PoolTooSmall(
        f"the weights alone do not fit: they need {ledger.weights / GIB:.2f} GiB, and {ledger.budget / GIB:.2f} of "
        f"{ledger.device} may be used{used}",
        ledger,
        "take a device with more memory" + (", or end what else uses this one" if used else ""),
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
