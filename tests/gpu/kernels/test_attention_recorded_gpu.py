"""Attention of recorded steps with prompts: any division of rows in one recording, padding included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from strata.kernels.attention import fixed as attention_fixed
from strata.kernels.attention import recorded as attention_recorded
from strata.kernels.attention.batch_parts import BatchParts, RecordedParts
from tests.gpu.kernels.test_attention_parts_gpu import SHAPES, STEPS, arguments, assert_close, exact

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]


def as_recorded(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same arguments with a division that the device alone knows."""
    *vectors, batch, spec = given
    pages = batch.pages
    assert isinstance(pages.parts, BatchParts)
    decodes = pages.parts.decodes
    starts, lengths = batch.offsets[:-1].clone(), pages.lengths.clone()
    starts[:decodes] = batch.offsets[1 : decodes + 1]
    lengths[decodes:] = 0
    bounds = torch.tensor([decodes, len(lengths)], dtype=torch.int32, device="cuda")
    return *vectors, batch._replace(pages=replace(pages, parts=RecordedParts(lengths, starts, bounds))), spec


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
        parts=RecordedParts(
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
    given = as_recorded(arguments(step, shape))
    assert attention_recorded.supports(*given)
    wanted = exact(given)
    assert_close(attention_recorded.attend(*given), wanted)
    for sequences, tokens in ((1, 1), (1, 200), (7, 4), (40, 133)):
        found = attention_recorded.attend(*padded(given, sequences, tokens))
        assert_close(found[: len(wanted)], wanted)
        assert not found[len(wanted) :].any()


@pytest.mark.parametrize("window", [1, 300, 1100])
def test_windows(window: int) -> None:
    given = as_recorded(arguments(STEPS["everything"], (16, 8, 128), window))
    assert_close(attention_recorded.attend(*given), exact(given))


def test_deterministic_rows_have_the_bits_of_another_division() -> None:
    given = arguments(STEPS["everything"], (16, 8, 128))
    wanted = attention_fixed.attend(*given)
    found = attention_fixed.attend(*padded(as_recorded(given), 9, 50))
    assert torch.equal(found[: len(wanted)], wanted)
    assert found.isfinite().all()


def test_one_recording_serves_other_lengths() -> None:
    """Lengths, tables and the division are read when it is replayed."""
    steps = [[(900, 1), (31, 1), (0, 298)], [(0, 300)], [(5, 1), (600, 120), (0, 1), (64, 120), (17, 58)]]
    cases = [as_recorded(arguments(step, (16, 8, 128))) for step in steps]
    sequences, most = 6, 64
    pool = max(len(given[3].pages.keys[0]) for given in cases)
    keys, values = (torch.zeros(pool, 16, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q, k, v = (torch.zeros(300, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (16, 8, 8))
    lengths, decode_lengths, starts = torch.zeros(3, sequences, dtype=torch.int32, device="cuda")
    bounds = torch.zeros(2, dtype=torch.int32, device="cuda")
    offsets = torch.full((sequences + 1,), 300, dtype=torch.int32, device="cuda")
    tables = torch.zeros(sequences, most, dtype=torch.int32, device="cuda")
    *_, batch, spec = cases[0]
    parts = RecordedParts(decode_lengths, starts, bounds)
    pages = replace(batch.pages, keys=(keys,), values=(values,), tables=tables, lengths=lengths, parts=parts)
    own = (q, k, v, batch._replace(offsets=offsets, longest=300, pages=pages), spec)
    attention_recorded.attend(*own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attention_recorded.attend(*own)
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
