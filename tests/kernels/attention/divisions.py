"""Steps with prompts for tests of their division: sequences that decode first, then prompts, then padding."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """cached, new: tokens of each sequence before the step and in it. decodes: the first so many have one new token."""

    cached: tuple[int, ...]
    new: tuple[int, ...]
    decodes: int

    @property
    def totals(self) -> list[int]:
        return [held + count for held, count in zip(self.cached, self.new, strict=True)]


def random_step(draw: random.Random, most_prompts: int, most_tokens: int) -> Step:
    decodes, prompts = draw.randrange(40), draw.randrange(most_prompts + 1)
    new, left = [1] * decodes, most_tokens - decodes
    for _ in range(prompts):
        count = min(left, draw.choice([1, 2, 15, 16, 17, 100, 511, 1023, 1024, 1025, 2048, 3000, 8000]))
        if count:
            new.append(count)
            left -= count
    cached = [draw.choice([0, 0, 1, 15, 16, 127, 1000, 4096]) for _ in new]
    return Step(tuple(cached), tuple(new), decodes)


def random_fresh(draw: random.Random, most_prompts: int, most_tokens: int) -> tuple[int, ...]:
    """New tokens of prompts that have no others; the last leaves room for a whole block."""
    new: list[int] = []
    left = most_tokens - 127
    for _ in range(draw.randrange(1, most_prompts + 1)):
        count = min(left, draw.choice([1, 2, 15, 127, 128, 129, 511, 1023, 1024, 1025, 2048, 3000, 8000]))
        if count:
            new.append(count)
            left -= count
    return tuple(new)


def tensors(step: Step, sequences: int, tokens: int, most_pages: int, page_size: int) -> dict[str, Tensor]:
    """What a recording of a size holds of a step: offsets, lengths, bounds, and tables that are right as far as the
    sequences go, with pages of nobody behind."""
    spare = sequences - len(step.new)
    ends = torch.tensor((0, *step.new), dtype=torch.int32).cumsum(0).tolist() + [tokens] * spare
    lengths = step.totals + [0] * spare
    tables = torch.full((sequences, most_pages), 10**6, dtype=torch.int32)
    page = 0
    for sequence, total in enumerate(lengths):
        used = -(-total // page_size)
        tables[sequence, :used] = torch.arange(page, page + used)
        page += used
    return {
        "offsets": torch.tensor(ends, dtype=torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "bounds": torch.tensor([step.decodes, min(len(step.new) + 1, sequences)], dtype=torch.int32),
        "tables": tables,
    }
