"""Attention of steps with prompts: equal to exact attention, eagerly and in one CUDA graph, padding included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from strata.kernels.attention import batch_invariant as attention_fixed
from strata.kernels.attention import mixed as attention_mixed
from strata.kernels.attention.attention import attention
from strata.kernels.attention.batch_split import BatchSplit
from strata.kernels.attention.spec import AttentionCall, AttentionSpec, Sequences
from strata.kernels.state.paged import PagedKV
from tests.gpu.tensors import captured

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


PAGE = 16
SHAPES = [(32, 8, 128), (14, 2, 64), (6, 6, 80), (16, 8, 128)]
# Of each sequence the tokens in pages and the new ones.
STEPS = {
    "fresh alike": [(0, 2048), (0, 2048)],
    "fresh and short": [(0, 600), (0, 1536), (0, 2), (0, 1024), (0, 1024), (0, 37)],
    "fresh with rows left": [(0, 1300), (0, 1300)],
    "after whole blocks": [(4096, 2048)],
    "after less than a block": [(48, 1500)],
    "after blocks and more": [(777, 2000)],
    "after many keys": [(9221, 1700)],
    "everything": [(5, 1), (900, 1), (0, 1), (64, 300), (1040, 1100), (0, 2048), (3, 3), (512, 1024), (0, 17)],
    "only decodes and short prompts": [(31, 1), (100, 1), (0, 40), (500, 500)],
}


def arguments(
    step: Sequence[tuple[int, int]], shape: tuple[int, int, int], window: int | None = None
) -> tuple[Any, ...]:
    """Those of `attention` in a step that is launched eagerly, in bf16, queries, keys and values as views of wider
    tensors as the engine makes them.

    Pages lie in disorder, and nothing but the sequences' own tokens is finite in them.
    """
    heads, kv_heads, head_dim = shape
    new = [count for _, count in step]
    totals = [held + count for held, count in step]
    pages = [-(-total // PAGE) for total in totals]
    order = torch.randperm(sum(pages) + 5, device="cuda").int()
    tables = torch.zeros(len(step), max(pages), dtype=torch.int32, device="cuda")
    keys, values = (
        torch.full((len(order), PAGE, kv_heads, head_dim), torch.nan, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    rotated = torch.randn(sum(new), heads + kv_heads, head_dim, device="cuda").bfloat16()
    product = torch.randn(sum(new), heads + 2 * kv_heads, head_dim, device="cuda").bfloat16()
    q, k = rotated.split((heads, kv_heads), 1)
    v = product[:, heads + kv_heads :]
    slots, at, used = [], 0, 0
    for row, (total, count, held) in enumerate(zip(totals, new, pages, strict=True)):
        mine = order[used : used + held]
        used += held
        tables[row, :held] = mine
        place = torch.arange(total, device="cuda")
        where = mine[place // PAGE].long() * PAGE + place % PAGE
        for pool, fresh in ((keys, k), (values, v)):
            pool.flatten(0, 1)[where] = torch.randn(total, kv_heads, head_dim, device="cuda").bfloat16()
            pool.flatten(0, 1)[where[total - count :]] = fresh[at : at + count]
        slots.append(where[total - count :].int())
        at += count
    offsets = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    lengths = torch.tensor(totals, dtype=torch.int32, device="cuda")
    decodes = next((at for at, count in enumerate(new) if count > 1), len(new))
    starts, decode_lengths = offsets[:-1].clone(), lengths.clone()
    starts[:decodes] = offsets[1 : decodes + 1]
    decode_lengths[decodes:] = 0
    bounds = torch.tensor([decodes, len(new)], dtype=torch.int32, device="cuda")
    parts = BatchSplit(decode_lengths, starts, bounds, decodes)
    paged = PagedKV((keys,), (values,), tables, lengths, torch.cat(slots), parts=parts)
    return q, k, v, Sequences(offsets, max(new), paged), AttentionSpec(0, head_dim**-0.5, window)


def exact(arguments: tuple[Any, ...]) -> torch.Tensor:
    """The reference in float64."""
    q, k, v, batch, spec = arguments
    wide = replace(batch.pages, keys=(batch.pages.keys[0].double(),), values=(batch.pages.values[0].double(),))
    vectors = (one.double() for one in (q, k, v))
    found: torch.Tensor = attention.reference(*vectors, batch._replace(pages=wide), spec)
    return found


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Every row: weights and results are rounded to bf16, here and there twice."""
    assert found.isfinite().all()
    error = (found.double() - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
    assert float(error.max()) < 8e-3


def as_captured(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with a division that the device alone knows."""
    *vectors, batch, spec = given
    pages = batch.pages
    return *vectors, batch._replace(pages=replace(pages, parts=replace(pages.parts, decodes=None))), spec


def padded(given: tuple[Any, ...], sequences: int, tokens: int) -> tuple[Any, ...]:
    """With so many sequences of length 0 behind the others, to the first of which all padding tokens belong."""
    q, k, v, batch, spec = given
    pages, first = batch.pages, q.shape[0]
    wide = [torch.cat([x, torch.full((tokens, *x.shape[1:]), torch.nan, device="cuda").to(x)]) for x in (q, k, v)]
    ends = [first + tokens] * sequences
    more = torch.zeros(sequences, dtype=torch.int32, device="cuda")
    pages = replace(
        pages,
        tables=torch.cat([pages.tables, pages.tables.new_zeros(sequences, pages.tables.shape[1])]),
        lengths=torch.cat([pages.lengths, more]),
        parts=BatchSplit(
            torch.cat([pages.parts.decode_lengths, more]),
            torch.cat([pages.parts.starts, torch.tensor([first, *ends[:-1]], dtype=torch.int32, device="cuda")]),
            pages.parts.bounds + torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        ),
    )
    offsets = torch.cat([batch.offsets, torch.tensor(ends, dtype=torch.int32, device="cuda")])
    return *wide, batch._replace(offsets=offsets, longest=first + tokens, pages=pages), spec


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_every_row_and_padding(step: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    eager = arguments(step, shape)
    given = as_captured(eager)
    wanted = exact(given)
    for called in (eager, given):
        assert attention_mixed.supports(AttentionCall(*called))
        assert_close(attention_mixed.attend(AttentionCall(*called)), wanted)
    for sequences, tokens in ((1, 1), (1, 200), (7, 4), (40, 133)):
        found = attention_mixed.attend(AttentionCall(*padded(given, sequences, tokens)))
        assert_close(found[: len(wanted)], wanted)
        assert not found[len(wanted) :].any()


@pytest.mark.parametrize("window", [1, 300, 1100])
def test_windows(window: int) -> None:
    given = arguments(STEPS["everything"], (16, 8, 128), window)
    for called in (given, as_captured(given)):
        assert_close(attention_mixed.attend(AttentionCall(*called)), exact(given))


def test_deterministic_rows_have_the_bits_of_another_division() -> None:
    given = arguments(STEPS["everything"], (16, 8, 128))
    wanted = attention_fixed.attend(AttentionCall(*given))
    found = attention_fixed.attend(AttentionCall(*padded(as_captured(given), 9, 50)))
    assert torch.equal(found[: len(wanted)], wanted)
    assert found.isfinite().all()


def test_one_recording_serves_other_lengths() -> None:
    """Lengths, tables and the division are read when it is replayed."""
    steps = [[(900, 1), (31, 1), (0, 298)], [(0, 300)], [(5, 1), (600, 120), (0, 1), (64, 120), (17, 58)]]
    cases = [as_captured(arguments(step, (16, 8, 128))) for step in steps]
    sequences, most = 6, 64
    pool = max(len(given[3].pages.keys[0]) for given in cases)
    keys, values = (torch.zeros(pool, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q, k, v = (torch.zeros(300, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (16, 8, 8))
    lengths, decode_lengths, starts = torch.zeros(3, sequences, dtype=torch.int32, device="cuda")
    bounds = torch.zeros(2, dtype=torch.int32, device="cuda")
    offsets = torch.full((sequences + 1,), 300, dtype=torch.int32, device="cuda")
    tables = torch.zeros(sequences, most, dtype=torch.int32, device="cuda")
    *_, batch, spec = cases[0]
    parts = BatchSplit(decode_lengths, starts, bounds)
    pages = replace(batch.pages, keys=(keys,), values=(values,), tables=tables, lengths=lengths, parts=parts)
    own = (q, k, v, batch._replace(offsets=offsets, longest=300, pages=pages), spec)
    graph, found = captured(lambda: attention_mixed.attend(AttentionCall(*own)))
    for given in cases:
        count = len(given[3].pages.lengths)
        for mine, other in ((keys, given[3].pages.keys[0]), (values, given[3].pages.values[0])):
            mine[: len(other)] = other
        for mine, other in zip((q, k, v), given[:3], strict=True):
            mine.copy_(other)
        offsets.fill_(300)[: count + 1] = given[3].offsets
        lengths.zero_()[:count] = given[3].pages.lengths
        decode_lengths.zero_()[:count] = given[3].pages.parts.decode_lengths
        starts.fill_(300)[:count] = given[3].pages.parts.starts
        bounds.copy_(given[3].pages.parts.bounds)
        tables.zero_()[:count, : given[3].pages.tables.shape[1]] = given[3].pages.tables
        graph.replay()
        assert_close(found, exact(given))
