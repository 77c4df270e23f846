"""Query chunks of prompts cover each query of each prompt once, with the keys that it sees, and nothing else."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from strata.kernels.attention.query_chunks import (
    KEY_BLOCK,
    MAX_GATHERED,
    MAX_PROMPTS,
    MAX_QUERY_CHUNKS,
    MAX_TOKENS,
    QUERIES,
    QueryChunks,
    Rows,
    as_query_chunks,
    gathered_keys,
    keys_in_blocks,
    pure_prefill_rows,
    query_chunks,
)


class Step(NamedTuple):
    """cached, new: tokens of each sequence before the step and in it. decodes: the first so many have one new token."""

    cached: tuple[int, ...]
    new: tuple[int, ...]
    decodes: int

    @property
    def totals(self) -> list[int]:
        return [held + count for held, count in zip(self.cached, self.new, strict=True)]


def random_step(draw: random.Random, max_prompts: int, token_limit: int) -> Step:
    decodes, prompts = draw.randrange(40), draw.randrange(max_prompts + 1)
    new, left = [1] * decodes, token_limit - decodes
    for _ in range(prompts):
        count = min(left, draw.choice([1, 2, 15, 16, 17, 100, 511, 1023, 1024, 1025, 2048, 3000, 8000]))
        if count:
            new.append(count)
            left -= count
    cached = [draw.choice([0, 0, 1, 15, 16, 127, 1000, 4096]) for _ in new]
    return Step(tuple(cached), tuple(new), decodes)


def random_pure_prefill(draw: random.Random, max_prompts: int, token_limit: int) -> tuple[int, ...]:
    """New tokens of prompts that have no others; the last leaves room for a whole block."""
    new: list[int] = []
    left = token_limit - 127
    for _ in range(draw.randrange(1, max_prompts + 1)):
        count = min(left, draw.choice([1, 2, 15, 127, 128, 129, 511, 1023, 1024, 1025, 2048, 3000, 8000]))
        if count:
            new.append(count)
            left -= count
    return tuple(new)


def tensors(step: Step, sequences: int, tokens: int, page_limit: int, page_size: int) -> dict[str, Tensor]:
    """What a CUDA graph of a size holds of a step: offsets, lengths, bounds, and tables that are right as far as the
    sequences go, with pages of nobody behind."""
    spare = sequences - len(step.new)
    ends = torch.tensor((0, *step.new), dtype=torch.int32).cumsum(0).tolist() + [tokens] * spare
    lengths = step.totals + [0] * spare
    tables = torch.full((sequences, page_limit), 10**6, dtype=torch.int32)
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


ROWS = Rows(40 * 128, 32 * 128, 8 * 128, 9 * 128)
PURE_PREFILL = Rows(40 * 128, 32 * 128, 40 * 128, 48 * 128, pure_prefill=True)
MAX_PAGES = 1024
STEPS = [
    Step((), (), 0),
    Step((5, 900), (1, 1), 2),
    Step((0,), (MAX_TOKENS,), 0),
    Step((0, 0), (1, 1), 0),  # prompts of one token behind a longer one, as far as the division can tell
    Step((0,) * MAX_PROMPTS, (MAX_TOKENS // MAX_PROMPTS,) * MAX_PROMPTS, 0),
    Step((3, 100, 0, 4096), (1, 1025, QUERIES, 2 * QUERIES - 1), 1),
    *(random_step(random.Random(seed), MAX_PROMPTS, MAX_TOKENS) for seed in range(60)),
]


def divided(given: dict[str, Tensor], rows: Rows) -> QueryChunks:
    names = "offsets", "lengths", "bounds"
    return as_query_chunks(query_chunks(*(given[name] for name in names), rows), rows)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{len(step.new)} of {sum(step.new)}")
def test_each_query_once_with_its_keys(step: Step) -> None:
    given = tensors(step, len(step.new) + 3, MAX_TOKENS, MAX_PAGES, 16)
    chunks = divided(given, ROWS)
    wanted, row, block = set(), 0, 0
    block_ends, sequences = [], []
    for sequence, (cached, new) in enumerate(zip(step.cached, step.new, strict=True)):
        if sequence >= step.decodes:
            wanted |= {(row + at, block * KEY_BLOCK, cached + at + 1) for at in range(new)}
            block += -(-(cached + new) // KEY_BLOCK)
            block_ends.append(block)
            sequences.append(sequence)
        row += new
    assert block * KEY_BLOCK == keys_in_blocks(step.totals[step.decodes :])
    ends, gathered = chunks.prompts.tolist()
    assert (ends[: len(block_ends)], gathered[: len(sequences)]) == (block_ends, sequences)
    assert {*ends[len(block_ends) :]} == {block}
    assert not any(gathered[len(sequences) :])
    found = []
    (query_starts, result_starts, key_starts, value_starts), (queries, keys) = (part.tolist() for part in chunks[:2])
    for at, count in enumerate(queries):
        assert 0 <= count <= QUERIES
        if not count:
            assert (query_starts[at], result_starts[at], key_starts[at], value_starts[at], keys[at]) == (0, 0, 0, 0, 0)
            continue
        assert at < MAX_QUERY_CHUNKS
        first, rest = divmod(query_starts[at], ROWS.queries)
        assert (rest, result_starts[at]) == (0, first * ROWS.result)
        begin, rest = divmod(key_starts[at], ROWS.keys)
        assert (rest, value_starts[at]) == (0, begin * ROWS.values)
        found += [(first + query, begin, keys[at] - count + query + 1) for query in range(count)]
    assert len(found) == len(wanted)
    assert set(found) == wanted


def test_the_longest_part_of_a_prompt_comes_first() -> None:
    given = tensors(Step((0, 0), (3000, 2500), 0), 2, 5500, MAX_PAGES, 16)
    keys = divided(given, ROWS).lengths[1]
    assert keys[:7].tolist() == [2500, 2048, 1024, 3000, 2048, 1024, 0]


PURE_PREFILL_STEPS = [
    (MAX_TOKENS,),
    (MAX_TOKENS // MAX_PROMPTS,) * MAX_PROMPTS,
    (1,),
    (1, 1, 2047),
    (2047, 1),
    (1025, 1, QUERIES, 2 * QUERIES - 1),
    *(random_pure_prefill(random.Random(seed), MAX_PROMPTS, MAX_TOKENS) for seed in range(60)),
]


@pytest.mark.parametrize("new", PURE_PREFILL_STEPS, ids=lambda new: f"{len(new)} of {sum(new)}")
def test_fresh_prompts_see_their_own_rows(new: tuple[int, ...]) -> None:
    """Each query once with the keys up to its own; beside them as many as make the last prompt's blocks whole, and no
    block reads a row that has no result."""
    size = pure_prefill_rows(new)
    given = tensors(Step((0,) * len(new), new, 0), len(new) + 1, size, MAX_PAGES, 16)
    chunks, apart = divided(given, PURE_PREFILL), divided(given, PURE_PREFILL._replace(keys=8 * 128))
    assert apart.starts[2].equal(chunks.starts[2] // PURE_PREFILL.queries * 8 * 128)
    assert apart.starts[[0, 1, 3]].equal(chunks.starts[[0, 1, 3]])
    assert apart.lengths.equal(chunks.lengths)
    wanted, row = set(), 0
    for count in (*new[:-1], new[-1] + size - sum(new)):
        wanted |= {(row + at, row, at + 1) for at in range(count)}
        row += count
    assert row == size
    found = []
    for query, result, key, value, queries, keys in zip(*chunks.starts.tolist(), *chunks.lengths.tolist(), strict=True):
        assert 0 <= queries <= QUERIES
        first, begin = query // PURE_PREFILL.queries, key // PURE_PREFILL.queries
        assert (query, result) == (first * PURE_PREFILL.queries, first * PURE_PREFILL.result)
        assert (key, value) == (begin * PURE_PREFILL.queries, begin * 48 * 128)
        found += [(first + at, begin, keys - queries + at + 1) for at in range(queries)]
        assert begin + -(-keys // KEY_BLOCK) * KEY_BLOCK <= size
    assert len(found) == len(wanted)
    assert set(found) == wanted
    assert int((chunks.lengths[0] > 0).sum()) <= MAX_QUERY_CHUNKS
    assert 0 <= size - sum(new) < KEY_BLOCK


def test_a_pure_prefill_step_without_prompts_has_no_query_chunks() -> None:
    given = tensors(Step((), (), 0), 3, MAX_TOKENS, MAX_PAGES, 16)
    chunks = divided(given, PURE_PREFILL)
    assert not any(part.any() for part in chunks[:3])


def test_there_is_room_for_the_longest_sequence_and_for_starts_that_a_number_holds() -> None:
    assert gathered_keys(100) == MAX_PROMPTS * KEY_BLOCK
    assert gathered_keys(20_480) == MAX_GATHERED
    assert gathered_keys(1_000_000) == 1_000_064
    assert gathered_keys(1_000_000, 4096) == (1 << 19) - KEY_BLOCK
