"""Steps of recurrent operations by hand: sequences in pieces, over rows of a pool that nobody has filled."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from strata.kernels.op import Operation
from strata.kernels.state.recurrent import RecurrentStates
from strata.models.batch import Batch

HERE = object()  # where a batch stands among arguments


def step(lengths: Sequence[int], starts: Sequence[int] | None = None, states: RecurrentStates | None = None) -> Batch:
    """So many tokens of each sequence, the first of them at these positions, 0 by default."""
    starts = [0] * len(lengths) if starts is None else starts
    positions = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    ids = torch.tensor(positions, dtype=torch.int32)
    return Batch(ids, ids, offsets, max(lengths, default=0), states=states)


def pool(rows: int, *shapes: tuple[tuple[int, ...], torch.dtype]) -> RecurrentStates:
    """One layer's tensors. What was never written must never be read."""
    tensors = tuple(torch.full((rows, *shape), torch.nan, dtype=dtype) for shape, dtype in shapes)
    return RecurrentStates((tensors,), torch.empty(0, dtype=torch.int32))


def in_pieces(
    run: Operation | Any,
    given: Sequence[Tensor],
    others: Sequence[Any],
    lengths: Sequence[int],
    states: RecurrentStates,
    cuts: Sequence[Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """The results [tokens, ...] of packed sequences that run in several steps, and the rows that they had.

    given: what has a row a token. others: the arguments behind them, `HERE` in place of the batch. cuts: how many
    tokens each sequence runs in each step. Sequences stand in rows that go backwards.
    """
    slots = torch.arange(len(lengths), 0, -1, dtype=torch.int32)
    firsts = [0, *accumulate(lengths)][:-1]
    done = [0] * len(lengths)
    found: list[list[Tensor]] = [[] for _ in lengths]
    for counts in cuts:
        runs = [number for number, count in enumerate(counts) if count]
        # A sequence without tokens stands in the step, too; it must leave its row alone.
        chosen = list(range(len(lengths))) if len(runs) % 2 else runs
        batch = step(
            [counts[i] for i in chosen], [done[i] for i in chosen], RecurrentStates(states.tensors, slots[chosen])
        )
        rows = torch.tensor([firsts[i] + done[i] + at for i in chosen for at in range(counts[i])])
        arguments = [batch if one is HERE else one for one in others]
        result = run(*(one[rows] for one in given), *arguments)
        for number, (first, end) in zip(chosen, pairwise(batch.offsets.tolist()), strict=True):
            found[number].append(result[first:end])
            done[number] += counts[number]
    assert done == list(lengths)
    return torch.cat([torch.cat(parts) for parts in found]), slots
