"""Steps with prompts, part by part: equal to exact attention, whichever kernel takes a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from strata.kernels.attention import parts as attention_parts
from strata.kernels.attention.attention import attention
from strata.kernels.attention.batch_parts import divide, library_reach
from strata.kernels.attention.join import join
from strata.kernels.attention.spec import AttentionSpec, Sequences
from strata.kernels.state.kv_read import kv_read
from strata.kernels.state.paged import PagedKV

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
    "after more keys than are read at once": [(attention_parts.MOST_KEYS + 1029, 1700)],
    "everything": [(5, 1), (900, 1), (0, 1), (64, 300), (1040, 1100), (0, 2048), (3, 3), (512, 1024), (0, 17)],
    "only decodes and short prompts": [(31, 1), (100, 1), (0, 40), (500, 500)],
}


def arguments(
    step: Sequence[tuple[int, int]], shape: tuple[int, int, int], window: int | None = None
) -> tuple[Any, ...]:
    """Those of `attention` in bf16, queries, keys and values as views of wider tensors as the engine makes them.

    Pages lie in disorder, and nothing but the sequences' own tokens is finite in them.
    """
    heads, kv_heads, head_dim = shape
    cached, new = zip(*step, strict=True)
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
    parts = divide(cached, new, library_reach(torch.bfloat16, head_dim, (window,), max(totals)))
    parts = replace(parts, starts=parts.starts.cuda())
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_every_part(step: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    given = arguments(step, shape)
    assert attention_parts.supports(*given)
    assert_close(attention_parts.attend(*given), exact(given))


@pytest.mark.parametrize("window", [1, 300, 1100])
def test_windows(window: int) -> None:
    given = arguments(STEPS["everything"], (16, 8, 128), window)
    assert_close(attention_parts.attend(*given), exact(given))


def test_the_library_takes_long_prompts() -> None:
    """As otherwise these tests would not be about it."""
    for name, rows in {
        "fresh alike": 4096,
        "after blocks and more": 2000 - (777 + 2000) % 512,
        "after more keys than are read at once": 1536 - 5,
        "only decodes and short prompts": 0,
    }.items():
        parts = arguments(STEPS[name], (2, 1, 64))[3].pages.parts
        assert sum(call.sequences * call.rows for call in parts.library) == rows


def test_misaligned_heads_are_left_to_other_kernels() -> None:
    q, *rest = arguments(STEPS["fresh alike"], (16, 8, 128))
    wide = torch.randn(q.shape[0], q.shape[1] * q.shape[2] + 4, device="cuda").bfloat16()
    assert not attention_parts.supports(wide[:, 4:].unflatten(1, q.shape[1:]), *rest)


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (3, 80), (1, 20)])
def test_kv_read(kv_heads: int, head_dim: int, page_size: int) -> None:
    tables = torch.randperm(900, device="cuda").int().view(3, 300)
    pools = [torch.randn(900, page_size, kv_heads, head_dim, device="cuda").bfloat16() for _ in range(2)]
    pages = PagedKV((pools[0],), (pools[1],), tables, tables[0], tables[0])
    for first, last in ((0, 1), (0, 300 * page_size), (page_size // 2, 299), (17, 18)):
        place = torch.arange(first, last, device="cuda")
        where = tables[2][place // page_size].long() * page_size + place % page_size
        for found, pool in zip(kv_read(pages, 0, 2, first, last), pools, strict=True):
            assert torch.equal(found, pool.flatten(0, 1)[where])


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("rows", [1, 33, 500])
def test_join(rows: int, head_dim: int) -> None:
    """Over the keys of two sets, far apart in weight as well as alike."""
    q, k, v = (torch.randn(count, 6, head_dim, device="cuda").double() for count in (rows, 50, 50))
    k[:20] *= torch.tensor([0.1, 1.0, 1.0, 5.0, 20.0, 1.0], device="cuda")[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, k)
    sets = [
        (torch.einsum("hqk,khd->qhd", part.softmax(-1), values), part.logsumexp(-1))
        for part, values in zip(scores.split((20, 30), -1), v.split((20, 30)), strict=True)
    ]
    (one, one_sums), (other, other_sums) = ((result.bfloat16().contiguous(), sums.float()) for result, sums in sets)
    padded = torch.full((6, rows + 7), torch.nan, device="cuda")
    padded[:, 7:] = one_sums
    out = torch.empty_like(one)
    sums = join(out, one, other, padded[:, 7:], other_sums)
    weights = torch.stack([one_sums, other_sums]).double().softmax(0).transpose(1, 2)[..., None]
    wanted = one.double() * weights[0] + other.double() * weights[1]
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(sums.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
